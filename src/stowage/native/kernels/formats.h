/* Dequantizes published block formats to floats, with the bits of the reference (weights/quantized/formats.py). Plain
 * code, block by block; coded.h is faster in bfloat16.
 */

#define BLOCK(format, VALUES)                                                                                          \
    static inline ALWAYS void NAME(block_##format)(const uint8_t *block, float *to);                                   \
    static void NAME(decode_##format)(const Coded *row, int64_t k, int count, float *to)                               \
    {                                                                                                                  \
        (void)count;                                                                                                   \
        NAME(block_##format)(row->w + k / VALUES * bytes_##format, to);                                                \
    }                                                                                                                  \
    static inline ALWAYS void NAME(block_##format)(const uint8_t *block, float *to)

BLOCK(q8_0, 32)
{
    float scale = read_half(block);
    for (int i = 0; i < 32; i++)
        to[i] = scale * (float)(int8_t)block[2 + i];
}

/* Codes of four bits in the halves of 16 bytes, of which the fifth bits are in `high`. */
static inline ALWAYS void NAME(decode_halves_of)(const uint8_t *codes, uint32_t high, float from, float scale,
                                                 float least, float *to)
{
    for (int i = 0; i < 16; i++) {
        to[i] = ((float)((codes[i] & 15) | (high >> i & 1) << 4) - from) * scale + least;
        to[i + 16] = ((float)(codes[i] >> 4 | (high >> (i + 16) & 1) << 4) - from) * scale + least;
    }
}

#define OF(format, CODES, HIGH, FROM, LEAST)                                                                           \
    BLOCK(format, 32)                                                                                                  \
    {                                                                                                                  \
        NAME(decode_halves_of)(block + CODES, HIGH, FROM, read_half(block), LEAST, to);                                \
    }
OF(q4_0, 2, 0, 8, -0.0f)
OF(q4_1, 4, 0, 0, read_half(block + 2))
OF(q5_0, 6, read_word(block + 2), 16, -0.0f)
OF(q5_1, 8, read_word(block + 4), 0, read_half(block + 2))
#undef OF

BLOCK(iq4_nl, 32)
{
    int8_t codes[32];
    float scale = read_half(block);
    codes_iq4(block + 2, codes);
    for (int i = 0; i < 32; i++)
        to[i] = (float)codes[i] * scale;
}

BLOCK(mxfp4_block, 32)
{
    float scale = power_of(block[0]);
    for (int i = 0; i < 16; i++) {
        to[i] = fp4_values[block[1 + i] & 15] * scale;
        to[i + 16] = fp4_values[block[1 + i] >> 4] * scale;
    }
}

#define OF(FORMAT, format, ...)                                                                                        \
    BLOCK(format, 256)                                                                                                 \
    {                                                                                                                  \
        float scales[32] = {[16] = -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, \
                            -0.0f, -0.0f, -0.0f, -0.0f};                                                               \
        int8_t codes[32];                                                                                              \
        scales_##format(block, scales);                                                                                \
        for (int j = 0; j < 8; j++) {                                                                                  \
            codes_##format(block, j, codes);                                                                           \
            for (int i = 0; i < 32; i++)                                                                               \
                to[32 * j + i] = (float)codes[i] * scales[2 * j + i / 16] + scales[2 * j + 16 + i / 16];               \
        }                                                                                                              \
    }
SUPER_BLOCKS(OF)
#undef OF
#undef BLOCK

static void NAME(decode_f32)(const Coded *row, int64_t k, int count, float *to)
{
    memcpy(to, row->w + 4 * k, (size_t)count * 4);
}

/* Dequantizes consecutive codes with the scale of input k, and its zero point or least value. */
#define OF(format, COUNT, SCALE, MORE, VALUE)                                                                          \
    static void NAME(decode_##format)(const Coded *row, int64_t k, int count, float *to)                               \
    {                                                                                                                  \
        float scale = SCALE, more = MORE;                                                                              \
        (void)scale, (void)more, (void)count;                                                                          \
        for (int i = 0; i < COUNT; i++)                                                                                \
            to[i] = VALUE;                                                                                             \
    }
OF(f16, count, 0, 0, read_half(row->w + 2 * (k + i)))
OF(bf16, count, 0, 0, NAME(one_b)(read_short(row->w + 2 * (k + i))))
OF(fp8, count, scale_of(row, k / row->group), 0, fp8_value(row->w[k + i]) * scale)
OF(s8, count, scale_of(row, k / row->group), 0, (float)(int8_t)row->w[k + i] * scale)
OF(u8, count, scale_of(row, k / row->group), 0, (float)(row->w[k + i] - 128) * scale)
OF(mxfp4, 32, scale_of(row, k / 32), 0, fp4_values[code_of(MXFP4, row, k, i)] * scale)
OF(nvfp4, 32, scale_of(row, k / 16), scale_of(row, k / 16 + 1), fp4_values[code_of(NVFP4, row, k, i)] * (i < 16 ? scale : more))
#define WITH_ZERO(FORMAT, format)                                                                                      \
    OF(format, 32, scale_of(row, k / row->group), zero_of(row, k / row->group),                                        \
       ((float)code_of(FORMAT, row, k, i) - more) * scale)
WITH_ZERO(INT4_WORDS, int4)
WITH_ZERO(GPTQ, gptq)
WITH_ZERO(AWQ, awq)
#undef WITH_ZERO
#undef OF

static void NAME(decode_packed4)(const Coded *row, int64_t k, int count, float *to)
{
    int64_t half = row->across, low = half < k ? 0 : half < k + 32 ? half - k : 32;
    float scale = read_half(row->scales + k / row->group * 2), least = read_half(row->zeros + k / row->group * 2);
    (void)count;
    NAME(decode_halves)(row->w + k, 0, scale, least, to, low);
    NAME(decode_halves)(row->w + k + low - half, 4, scale, least, to + low, 32 - low);
}

typedef void (*NAME(decoder))(const Coded *, int64_t, int, float *);
#define OF(FORMAT, format) [FORMAT] = NAME(decode_##format)
static const NAME(decoder) NAME(decoders)[] = {ALL_FORMATS(OF)};
#undef OF

/* Dequantizes inputs [k, end) of output n; k begins a block. Rounds to bfloat16 if that is computed with. */
static void NAME(decode)(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    Coded row = coded_row(job, n);
    int64_t size = job->format < Q2_K ? 32 : 256;
#if LANES >= 8
    int64_t done = avx2_decode_whole(job, n, k, end, to);
    k += done;
    to += done;
#endif
    for (; k < end; k += size, to += size) {
        int count = end - k < size ? (int)(end - k) : (int)size;
        NAME(decoders)[job->format](&row, k, count, to);
        for (int i = 0; job->form != FLOAT32 && i < count; i++)
            to[i] = NAME(one_b)(float_half(to[i]));
    }
}
