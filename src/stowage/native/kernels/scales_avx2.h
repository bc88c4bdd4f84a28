/* Scales of a piece of an output's row as floats with AVX2, those of a block side by side, and what is beside them. */

/* Halves that the four blocks of two groups begin with. */
static inline ALWAYS __m256 avx2_halves_of(const uint8_t *a, const uint8_t *b, int apart)
{
    return _mm256_cvtph_ps(_mm_setr_epi16((short)read_short(a), (short)read_short(a + apart), (short)read_short(a + 2 * apart),
                                          (short)read_short(a + 3 * apart), (short)read_short(b), (short)read_short(b + apart),
                                          (short)read_short(b + 2 * apart), (short)read_short(b + 3 * apart)));
}

/* Floats of eight scales in the lower bytes. */
static inline ALWAYS __m256 avx2_floats_of(int kind, __m256i v)
{
    __m128i halves = _mm256_castsi256_si128(v);
    return kind == SCALES_F16    ? _mm256_cvtph_ps(halves)
           : kind == SCALES_BF16 ? (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)
                                 : (__m256)v;
}

/* Scales of eight blocks, of which each `alike` (1, 2 or 4) have one; of 4 bytes also what is no float. */
static inline ALWAYS __m256 avx2_shared(const uint8_t *from, int kind, int64_t alike)
{
    __m256i which = _mm256_srlv_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)alike / 2));
    int64_t bytes = 8 / alike * scale_bytes[kind];
    __m256i v = bytes == 32 ? avx2_32(from)
                            : _mm256_castsi128_si256(bytes == 16  ? _mm_loadu_si128((const __m128i *)from)
                                                     : bytes == 8 ? _mm_loadl_epi64((const __m128i *)from)
                                                                  : _mm_cvtsi32_si128((int)read_word(from)));
    return _mm256_permutevar8x32_ps(avx2_floats_of(kind, v), which);
}

/* Whether blocks begin with their scale. */
#define AT_BEGIN(FORMAT) ((FORMAT) == Q8_0 || (FORMAT) == Q4_0 || (FORMAT) == Q4_1 || (FORMAT) == Q5_0 || (FORMAT) == Q5_1)

static inline ALWAYS __m256 avx2_floats(__m128i bytes, int with_sign)
{
    return _mm256_cvtepi32_ps(with_sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

/* As `scales_k`, so many times as large, the least values negated. */
static inline ALWAYS void avx2_scales_k(const uint8_t *block, float larger, float *scales, float *more)
{
    __m128i v = _mm_loadu_si128((const __m128i *)block), bits, high;
    bits = _mm_shuffle_epi8(v, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    bits = _mm_and_si128(_mm_srlv_epi32(bits, _mm_setr_epi32(0, 0, 0, 4)), _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    high = _mm_shuffle_epi8(v, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    bits = _mm_or_si128(bits, _mm_and_si128(_mm_srli_epi32(high, 2), _mm_set1_epi8(0x30)));
    __m128 halves = _mm_mul_ps(_mm_cvtph_ps(v), _mm_setr_ps(larger, -larger, 0, 0));
    _mm256_storeu_ps(scales, _mm256_mul_ps(_mm256_broadcastss_ps(halves), avx2_floats(bits, 0)));
    _mm256_storeu_ps(more, _mm256_mul_ps(_mm256_broadcastss_ps(_mm_movehdup_ps(halves)), avx2_floats(_mm_srli_si128(bits, 8), 0)));
}

/* Those of the first 16 and of the others take turns. */
static inline ALWAYS void avx2_scales_6(const uint8_t *block, float larger, float *scales, float *more)
{
    __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 192)), order);
    __m128 half = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(read_short(block + 208))), _mm_set1_ps(larger));
    __m256 scale = _mm256_broadcastss_ps(half);
    _mm256_storeu_ps(scales, _mm256_mul_ps(scale, avx2_floats(bytes, 1)));
    _mm256_storeu_ps(more, _mm256_mul_ps(scale, avx2_floats(_mm_srli_si128(bytes, 8), 1)));
}

/* Not 0: one of these halves is infinite or none. */
static inline ALWAYS unsigned avx2_is_odd(const uint8_t *half)
{
    return ((read_short(half) & 0x7fffu) + 0x400) & 0x8000;
}

/* Scales of Q4_K, Q5_K and Q6_K, of blocks from an address on. 0: a half of one is no number; else all are numbers. */
static inline int avx2_has_super_scales(int format)
{
    return format == Q4_K || format == Q5_K || format == Q6_K;
}

static inline ALWAYS int avx2_scales_super(int format, const uint8_t *at, int64_t blocks, float larger, float *scales, float *more)
{
    unsigned odd = 0;
    for (int64_t b = 0; b < blocks; b += 8, at += block_bytes_of[format])
        if (format == Q6_K) {
            avx2_scales_6(at, larger, scales + b, more + b);
            odd |= avx2_is_odd(at + 208);
        } else {
            avx2_scales_k(at, larger, scales + b, more + b);
            odd |= avx2_is_odd(at) | avx2_is_odd(at + 2);
        }
    return !odd;
}

/* Four bits of each, of which two more are elsewhere, less 32. */
static inline ALWAYS void avx2_scales_4(const uint8_t *block, float *scales)
{
    __m256i places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), low = _mm256_set1_epi32((int)read_word(block + 4));
    __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(read_short(block + 2)), places);
    low = _mm256_and_si256(_mm256_srlv_epi32(low, _mm256_add_epi32(places, places)), _mm256_set1_epi32(15));
    high = _mm256_and_si256(_mm256_slli_epi32(high, 4), _mm256_set1_epi32(48));
    __m256 numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32)));
    __m128 scale = _mm_cvtph_ps(_mm_cvtsi32_si128(read_short(block)));
    _mm256_storeu_ps(scales, _mm256_mul_ps(_mm256_broadcastss_ps(scale), numbers));
}

static inline int avx2_has_sixteens(int format)
{
    return format == Q3_K || (format > IQ4_XS && format < FORMATS_END);
}

/* Of formats with a scale of each 16, those that `scales_*` find: of the first 16 of a block and of the others. */
static void avx2_scales_16(int format, const uint8_t *block, float *scales, float *more)
{
    float all[16];
    switch (format) {
#define OF(FORMAT, format, ...)                                                                                        \
    case FORMAT:                                                                                                       \
        scales_##format(block, all);                                                                                   \
        break;
        I_QUANTS(OF)
        SIGNS(OF)
#undef OF
    default:
        scales_q3_k(block, all);
    }
    for (int b = 0; b < 8; b++)
        scales[b] = all[2 * b], more[b] = all[2 * b + 1];
}

/* Halves of powers of two, whose exponents are bytes: see `power_of`. */
static inline ALWAYS __m256 avx2_powers(__m128i bytes)
{
    __m256i v = _mm256_cvtepu8_epi32(bytes), quiet = _mm256_set1_epi32(0x400000);
    __m256i odd = _mm256_or_si256(_mm256_cmpeq_epi32(v, _mm256_setzero_si256()), _mm256_cmpeq_epi32(v, _mm256_set1_epi32(255)));
    v = _mm256_or_si256(_mm256_slli_epi32(v, 23), _mm256_and_si256(odd, quiet));
    return _mm256_mul_ps((__m256)v, _mm256_set1_ps(0.5f));
}

/* 16 floats of 8 bits (e4m3) as floats of 16 bits, which are less by 2^8; all bits are set where one is none. */
static inline ALWAYS __m256i avx2_halves_of_e4m3(const uint8_t *at, __m256i *none)
{
    __m256i v = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)), 7), most = _mm256_set1_epi16(0x3f80);
    *none = _mm256_cmpeq_epi16(_mm256_and_si256(v, most), most);
    return _mm256_and_si256(v, _mm256_set1_epi16((short)0xbf80));
}

/* Halves of scales of E4M3 of eight blocks: of the first 16 inputs of each, and of the others. */
static inline ALWAYS void avx2_scales_e4m3(const Coded *row, const uint8_t *at, float *scales, float *more)
{
    __m256i none, v = avx2_halves_of_e4m3(at, &none);
    v = _mm256_or_si256(v, _mm256_and_si256(none, _mm256_set1_epi16(0x7e00)));
    __m256 own[2], whole = _mm256_set1_ps(row->whole), half = _mm256_set1_ps(0.5f);
    UNROLLED for (int i = 0; i < 2; i++) {
        own[i] = _mm256_cvtph_ps(i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
        own[i] = _mm256_mul_ps(own[i], _mm256_set1_ps(256));
        own[i] = row->kind == SCALES_DIVIDED ? _mm256_div_ps(own[i], whole) : _mm256_mul_ps(own[i], whole);
        own[i] = _mm256_mul_ps(own[i], half);
    }
    __m256 turns[2] = {_mm256_shuffle_ps(own[0], own[1], 0x88), _mm256_shuffle_ps(own[0], own[1], 0xdd)};
    _mm256_storeu_ps(scales, (__m256)_mm256_permute4x64_epi64((__m256i)turns[0], 0xd8));
    _mm256_storeu_ps(more, (__m256)_mm256_permute4x64_epi64((__m256i)turns[1], 0xd8));
}

/* Whether a scale, of any type, is for a group of any number of blocks. */
static inline int avx2_has_scales_apart(int format)
{
    return format == INT4_WORDS || format == PACKED4 || format == S8 || format == U8;
}

/* Of `blocks` blocks of a row from input k on, which begins one of 256 if these have scales in common: scales, and least
 * values or second scales, and zeros up to a whole group. */
static void avx2_scales(const Linear *job, const Coded *row, int64_t k, int64_t blocks, float *scales, float *more)
{
    int64_t b = 0, eights = blocks / 8 * 8;
    int format = job->format, bytes = block_bytes_of[format];
    const uint8_t *at = dynamic_block(format, row, k);
    if (avx2_has_super_scales(format)) {
        avx2_scales_super(format, at, eights, 1, scales, more);
        b = eights;
    } else if (avx2_has_sixteens(format))
        for (; b < eights; b += 8)
            avx2_scales_16(format, at + b / 8 * bytes, scales + b, more + b);
    else if (format == IQ4_XS)
        for (; b < eights; b += 8) /* other ones are none */
            avx2_scales_4(at + b / 8 * bytes, scales + b);
    else if (format == NVFP4)
        for (; b < eights; b += 8)
            avx2_scales_e4m3(row, row->scales + k / 16 + 2 * b, scales + b, more + b);
    else if ((AT_BEGIN(format) || format == IQ4_NL) && eights > 0) {
        for (; b < blocks; b += 8) {
            b = b < blocks - 8 ? b : blocks - 8; /* some of the last eight again */
            const uint8_t *own = at + b * bytes, *after = own + 4 * bytes;
            _mm256_storeu_ps(scales + b, avx2_halves_of(own, after, bytes));
            if (dynamic_kind(job) == LEAST)
                _mm256_storeu_ps(more + b, avx2_halves_of(own + 2, after + 2, bytes));
        }
    } else if (format == MXFP4 && job->kind == SCALES_E8M0)
        for (; b < eights; b += 8)
            _mm256_storeu_ps(scales + b, avx2_powers(_mm_loadl_epi64((const __m128i *)(row->scales + k / DYNAMIC_BLOCK + b))));
    else if (format == MXFP4_BLOCK)
        for (; b < eights; b += 8) {
            const uint8_t *own = at + b * bytes;
            uint64_t powers = 0; /* made elsewhere than numbers are */
            UNROLLED for (int i = 0; i < 8; i++)
                powers |= (uint64_t)own[17 * i] << 8 * i;
            _mm256_storeu_ps(scales + b, avx2_powers(_mm_cvtsi64_si128((long long)powers)));
        }
    else if (format == PLAIN)
        for (float own = scale_of(row, 0); b < blocks; b++)
            scales[b] = own, more[b] = 0;
    else if (avx2_has_scales_apart(format) && DYNAMIC_GROUP % row->group == 0 && row->kind != SCALES_E8M0)
        for (int64_t alike = row->group / DYNAMIC_BLOCK, end = blocks % alike == 0 && eights > 0 ? blocks : eights; b < end; b += 8) {
            b = b < blocks - 8 ? b : blocks - 8;
            int64_t group = (k / DYNAMIC_BLOCK + b) / alike;
            __m256 own = avx2_shared(row->scales + group * scale_bytes[row->kind], row->kind, alike), less = _mm256_setzero_ps();
            if (format == PACKED4)
                less = avx2_shared(row->zeros + 2 * group, SCALES_F16, alike);
            else if (row->zeros != NULL) {
                __m256i zero = (__m256i)avx2_shared(row->zeros + 4 * group, SCALES_F32, alike);
                zero = _mm256_and_si256(_mm256_srli_epi32(zero, row->zero_shift), _mm256_set1_epi32(15));
                less = _mm256_xor_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(zero), own), _mm256_set1_ps(-0.0f));
            }
            _mm256_storeu_ps(scales + b, own);
            _mm256_storeu_ps(more + b, less);
        }
    else if (avx2_has_scales_apart(format))
        for (int64_t group = k / job->group, end = (group + 1) * job->group - k; b < blocks; group++, end += job->group) {
            float own, less = 0;
            dynamic_scale_of_group(job, row, group, &own, &less);
            for (; b < blocks && b * DYNAMIC_BLOCK < end; b++)
                scales[b] = own, more[b] = less;
        }
    for (; b < blocks; b++)
        dynamic_scale(job, row, k + b * DYNAMIC_BLOCK, scales + b, more + b);
    for (; b % 4; b++)
        scales[b] = more[b] = 0;
}
