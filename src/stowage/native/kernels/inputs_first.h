/* Plain weights [inputs, outputs], as some checkpoints have experts: some outputs at a time are transposed, and then
 * multiplied as weights [outputs, inputs] are, with the same bits. The next inputs are prefetched meanwhile. */
#if LANES >= 8
#if LANES == 16
#define WIDE(name) _mm512_##name
typedef __m512i NAME(wide);
#else
#define WIDE(name) _mm256_##name
typedef __m256i NAME(wide);
#endif

/* Interleaves the words of four vectors. */
static inline ALWAYS void NAME(transpose_fours)(NAME(wide) v[4])
{
    NAME(wide) a = WIDE(unpacklo_epi32)(v[0], v[1]), b = WIDE(unpackhi_epi32)(v[0], v[1]);
    NAME(wide) c = WIDE(unpacklo_epi32)(v[2], v[3]), d = WIDE(unpackhi_epi32)(v[2], v[3]);
    v[0] = WIDE(unpacklo_epi64)(a, c);
    v[1] = WIDE(unpackhi_epi64)(a, c);
    v[2] = WIDE(unpacklo_epi64)(b, d);
    v[3] = WIDE(unpackhi_epi64)(b, d);
}

/* Loads a vector from pieces of 16 bytes, `apart` bytes apart. */
static inline ALWAYS NAME(wide) NAME(load_apart)(const char *at, int64_t apart)
{
#define PART(i) _mm_loadu_si128((const __m128i *)(at + i * apart))
#if LANES == 16
    __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(PART(0)), PART(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(v, PART(2), 2), PART(3), 3);
#else
    return _mm256_inserti128_si256(_mm256_castsi128_si256(PART(0)), PART(1), 1);
#endif
#undef PART
}

/* A vector of inputs, whose rows are `across` bytes apart, of each of eight outputs of two bytes, or four of four. */
static inline ALWAYS void NAME(transpose_block)(const char *at, int64_t across, char *to, int64_t stride, int outputs)
{
    NAME(wide) v[8], pairs[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < outputs; i++)
        v[i] = NAME(load_apart)(at + i * across, outputs * across);
    _Pragma("GCC unroll 8") for (int i = 0; i < outputs; i++)
        pairs[i] = outputs == 4 ? v[i] : i < 4 ? WIDE(unpacklo_epi16)(v[2 * i], v[2 * i + 1])
                                               : WIDE(unpackhi_epi16)(v[2 * i - 8], v[2 * i - 7]);
    _Pragma("GCC unroll 8") for (int i = 0; i < outputs; i++) {
        if (i % 4 == 0)
            NAME(transpose_fours)(pairs + i);
        memcpy(to + i * stride, &pairs[i], sizeof *pairs);
    }
}
#undef WIDE
#endif

/* Transposes outputs [n, end) and inputs [k, depth) one by one. */
static void NAME(transpose_each)(const char *at, int64_t across, int64_t n, int64_t end, int64_t k, int64_t depth,
                                 int size, char *to, int64_t stride)
{
    for (; n < end; n++)
        for (int64_t i = k; i < depth; i++)
            memcpy(to + n * stride + i * size, at + i * across + n * size, (size_t)size);
}

/* Transposes `wide` outputs, `size` bytes a number, into rows `stride` bytes apart. */
static inline ALWAYS void NAME(transpose_all)(const char *at, int64_t across, int64_t depth, int64_t wide, int size, char *to,
                                              int64_t stride)
{
    int64_t outputs = 0, inputs = 0;
#if LANES >= 8
    int step = 16 / size, deep = LANES * 4 / size;
    outputs = wide / step * step, inputs = depth / deep * deep;
    for (int64_t k = 0; k < inputs; k += deep)
        for (int64_t n = 0; n < outputs; n += step) {
            const char *block = at + k * across + n * size;
            if (n * size % 64 == 0)
                for (int i = 0; i < deep; i++)
                    FETCH_FAR(block + (i + INPUTS_AHEAD) * across);
            NAME(transpose_block)(block, across, to + n * stride + k * size, stride, step);
        }
#endif
    NAME(transpose_each)(at, across, outputs, wide, 0, inputs, size, to, stride);
    NAME(transpose_each)(at, across, 0, wide, inputs, depth, size, to, stride);
}

static void NAME(transpose)(const Linear *job, int64_t n, int64_t wide, char *to, int64_t stride)
{
    if (job->form == FLOAT32)
        NAME(transpose_all)((const char *)job->w + 4 * n, 4 * job->w_row, job->inputs, wide, 4, to, stride);
    else
        NAME(transpose_all)((const char *)job->w + 2 * n, 2 * job->w_row, job->inputs, wide, 2, to, stride);
}
