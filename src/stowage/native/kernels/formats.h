/* Weights in the block formats that checkpoints are published in, as floats: each computed as in the reference
 * (weights/quantized/formats.py), so to its bits. One block after the other, plainly; coded.h is quicker in bfloat16.
 */

static void NAME(decode_q8_0)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 34;
    float scale = read_half(block);
    (void)count;
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

static void NAME(decode_q4_0)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 18;
    (void)count;
    NAME(decode_halves_of)(block + 2, 0, 8, read_half(block), -0.0f, to);
}

static void NAME(decode_q4_1)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 20;
    (void)count;
    NAME(decode_halves_of)(block + 4, 0, 0, read_half(block), read_half(block + 2), to);
}

static void NAME(decode_q5_0)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 22;
    (void)count;
    NAME(decode_halves_of)(block + 6, read_word(block + 2), 16, read_half(block), -0.0f, to);
}

static void NAME(decode_q5_1)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 24;
    (void)count;
    NAME(decode_halves_of)(block + 8, read_word(block + 4), 0, read_half(block), read_half(block + 2), to);
}

static void NAME(decode_q4_k)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 256 * 144;
    float scales[16];
    (void)count;
    scales_k(block, scales);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++)
            to[32 * j + i] = (float)(block[16 + j / 2 * 32 + i] >> j % 2 * 4 & 15) * scales[j] - scales[8 + j];
}

static void NAME(decode_q5_k)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 256 * 176;
    float scales[16];
    (void)count;
    scales_k(block, scales);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 32; i++) {
            int code = (block[48 + j / 2 * 32 + i] >> j % 2 * 4 & 15) | (block[16 + i] >> j & 1) << 4;
            to[32 * j + i] = (float)code * scales[j] - scales[8 + j];
        }
}

static void NAME(decode_q6_k)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 256 * 210;
    float scale = read_half(block + 208);
    (void)count;
    for (int j = 0; j < 8; j++) {
        const uint8_t *low = block + j / 4 * 64 + j % 2 * 32, *high = block + 128 + j / 4 * 32;
        float own[2] = {scale * (float)(int8_t)block[192 + 2 * j], scale * (float)(int8_t)block[193 + 2 * j]};
        for (int i = 0; i < 32; i++) {
            int code = (low[i] >> j % 4 / 2 * 4 & 15) | (high[i] >> j % 4 * 2 & 3) << 4;
            to[32 * j + i] = own[i / 16] * (float)(code - 32);
        }
    }
}

static void NAME(decode_mxfp4_block)(const Coded *row, int64_t k, int count, float *to)
{
    const uint8_t *block = row->w + k / 32 * 17;
    float scale = power_of(block[0]);
    (void)count;
    for (int i = 0; i < 16; i++) {
        to[i] = fp4_values[block[1 + i] & 15] * scale;
        to[i + 16] = fp4_values[block[1 + i] >> 4] * scale;
    }
}

static void NAME(decode_mxfp4)(const Coded *row, int64_t k, int count, float *to)
{
    float scale = scale_of(row, k / 32);
    (void)count;
    for (int i = 0; i < 32; i++)
        to[i] = fp4_values[row->w[(k + i) / 2] >> i % 2 * 4 & 15] * scale;
}

static void NAME(decode_fp8)(const Coded *row, int64_t k, int count, float *to)
{
    float scale = scale_of(row, k / row->group);
    for (int i = 0; i < count; i++)
        to[i] = fp8_value(row->w[k + i]) * scale;
}

static void NAME(decode_f32)(const Coded *row, int64_t k, int count, float *to)
{
    memcpy(to, row->w + 4 * k, (size_t)count * 4);
}

static void NAME(decode_f16)(const Coded *row, int64_t k, int count, float *to)
{
    for (int i = 0; i < count; i++)
        to[i] = read_half(row->w + 2 * (k + i));
}

static void NAME(decode_bf16)(const Coded *row, int64_t k, int count, float *to)
{
    for (int i = 0; i < count; i++)
        to[i] = NAME(one_b)(read_short(row->w + 2 * (k + i)));
}

static void NAME(decode_int4)(const Coded *row, int64_t k, int count, float *to)
{
    float scale = scale_of(row, k / row->group), zero = zero_of(row, k / row->group);
    (void)count;
    for (int i = 0; i < 32; i++)
        to[i] = ((float)(row->w[(k + i) / 2] >> i % 2 * 4 & 15) - zero) * scale;
}

/* Of GPTQ and AWQ an output's codes lie `across` bytes apart. */
static void NAME(decode_gptq)(const Coded *row, int64_t k, int count, float *to)
{
    float scale = scale_of(row, k / row->group), zero = zero_of(row, k / row->group);
    (void)count;
    for (int i = 0; i < 32; i++)
        to[i] = ((float)(read_word(row->w + (k + i) / 8 * row->across) >> i % 8 * 4 & 15) - zero) * scale;
}

static void NAME(decode_awq)(const Coded *row, int64_t k, int count, float *to)
{
    float scale = scale_of(row, k / row->group), zero = zero_of(row, k / row->group);
    (void)count;
    for (int i = 0; i < 32; i++)
        to[i] = ((float)(read_word(row->w + (k + i) * row->across) >> row->shift & 15) - zero) * scale;
}

static void NAME(decode_packed4)(const Coded *row, int64_t k, int count, float *to)
{
    int64_t half = row->across;
    float scale = read_half(row->scales + k / row->group * 2), least = read_half(row->zeros + k / row->group * 2);
    (void)count;
    for (int64_t i = k; i < k + 32; i++)
        *to++ = (float)(i < half ? row->w[i] & 15 : row->w[i - half] >> 4) * scale + least;
}

typedef void (*NAME(decoder))(const Coded *, int64_t, int, float *);
#define OF(FORMAT, format) [FORMAT] = NAME(decode_##format)
static const NAME(decoder) NAME(decoders)[] = {ALL_FORMATS(OF)};
#undef OF

/* Inputs [k, end) of output n as numbers; k begins a block. Rounded to bfloat16 if that is what is computed with. */
static void NAME(decode)(const Linear *job, int64_t n, int64_t k, int64_t end, float *to)
{
    Coded row = coded_row(job, n);
    int64_t size = format_values[job->format];
    for (; k < end; k += size, to += size) {
        int count = end - k < size ? (int)(end - k) : (int)size;
        NAME(decoders)[job->format](&row, k, count, to);
        for (int i = 0; job->form != FLOAT32 && i < count; i++)
            to[i] = NAME(one_b)(float_half(to[i]));
    }
}
