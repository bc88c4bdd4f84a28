/* Products of one or two rows with weights of 4 bits with AVX2: the 16 numbers that codes of a block mean are computed and rounded
 * once, and looked up. A register has a table of each of two outputs, and then numbers of four inputs of each:
 *
 *     codes      0  4  1  5  2  6  3  7 ...   bytes of one half
 *     numbers    low and high bytes are looked up and joined: 0, 4, 1, ... are bfloat16 of 16 bits
 *     floats     0  1  2  3, shifted up; and 4  5  6  7, what is left if the lower ones are cut off
 *
 * So each column of sums has its inputs in the order of linear.h, and the bits are those of numbers. And the scales of INT4_WORDS.
 */

/* Weights are computed 2^16 times as large: that minus the weight is rounded to where the eighth bit of the weight is, and what
 * is left is the weight, rounded there to the nearest of bfloat16, halfway cases to even. (Not plus, as by Veltkamp, because
 * that may have another exponent.) Of weights below 2^96. */
#define AVX2_LARGER 65536.0f
static inline ALWAYS __m256 avx2_nearest_half(__m256 larger)
{
    return _mm256_sub_ps(larger, _mm256_fnmadd_ps(larger, _mm256_set1_ps(1 / AVX2_LARGER), larger));
}

#define AVX2_BY_TABLE(OF) OF(INT4_WORDS, int4, 64, 1, BIASED, SMALL) AVX2_LOOKED_UP(OF)

/* The low and high bytes of bfloat16. */
typedef struct {
    __m256i low, high;
} Avx2Table;

/* Floats that are numbers of bfloat16, of four codes after the other. */
static inline ALWAYS __m256i avx2_pack_halves(__m256 first, __m256 second)
{
    return _mm256_packus_epi32(_mm256_srli_epi32((__m256i)first, 16), _mm256_srli_epi32((__m256i)second, 16));
}

/* Of scales that are 2^16 times as large (`AVX2_LARGER`): codes less 8, whose numbers are those of 1 to 8 with two signs. */
static inline ALWAYS Avx2Table avx2_table_of_eights(__m256 scale)
{
    __m256 small = _mm256_mul_ps(_mm256_setr_ps(1, 2, 3, 4, 1, 2, 3, 4), scale);
    __m256 large = _mm256_mul_ps(_mm256_setr_ps(5, 6, 7, 8, 5, 6, 7, 8), scale);
    __m256i sizes = avx2_pack_halves(avx2_nearest_half(small), avx2_nearest_half(large));
    __m256i which = _mm256_broadcastsi128_si256(_mm_setr_epi8(14, 12, 10, 8, 6, 4, 2, 0, -1, 0, 2, 4, 6, 8, 10, 12));
    __m256i sign = _mm256_broadcastsi128_si256(_mm_set_epi64x(0, (long long)0x8080808080808080));
    __m256i high = _mm256_shuffle_epi8(sizes, _mm256_or_si256(which, _mm256_set1_epi8(1)));
    return (Avx2Table){_mm256_shuffle_epi8(sizes, which), _mm256_xor_si256(high, sign)};
}

/* Of halves of such scales: codes of FP4, of which the last eight are the first ones negated. */
static inline ALWAYS Avx2Table avx2_table_of_fp4(__m256 scale)
{
    __m256 small = _mm256_mul_ps(_mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), scale);
    __m256 large = _mm256_mul_ps(_mm256_setr_ps(4, 6, 8, 12, 4, 6, 8, 12), scale);
    __m256i sizes = avx2_pack_halves(avx2_nearest_half(small), avx2_nearest_half(large));
    __m256i which = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14));
    __m256i sign = _mm256_broadcastsi128_si256(_mm_set_epi64x((long long)0x8080808080808080, 0));
    __m256i high = _mm256_shuffle_epi8(sizes, _mm256_or_si256(which, _mm256_set1_epi8(1)));
    return (Avx2Table){_mm256_shuffle_epi8(sizes, which), _mm256_xor_si256(high, sign)};
}

/* Of scales as of `avx2_table_of_eights`: codes less a zero point, or what they mean in IQ4_XS. */
static inline ALWAYS Avx2Table avx2_table_of(int format, __m256 scale, __m256 zero)
{
    __m256i first, second, byte = _mm256_set1_epi16(255);
    __m256 numbers[4];
    UNROLLED for (int i = 0; i < 4; i++) {
        __m256 codes = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
        if (format == INT4_WORDS)
            codes = _mm256_sub_ps(_mm256_add_ps(codes, _mm256_set1_ps((float)(4 * i))), zero);
        else
            codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set1_epi32(*(const int *)(const void *)(not_linear + 4 * i))));
        numbers[i] = avx2_nearest_half(_mm256_mul_ps(codes, scale));
    }
    first = avx2_pack_halves(numbers[0], numbers[1]), second = avx2_pack_halves(numbers[2], numbers[3]);
    return (Avx2Table){_mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte)),
                       _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8))};
}

/* The 16 bytes of block b of group g. */
static inline ALWAYS __m128i avx2_bytes_of(int format, const uint8_t *at, int64_t g, int b)
{
    int64_t from = format == IQ4_XS ? g / 2 * 136 + g % 2 * 64 + 8 + 16 * b : 64 * g + 16 * b;
    return _mm_loadu_si128((const __m128i *)(at + from));
}

/* Sums of rows go on with inputs [k, k + 16), whose codes are in the order above. `upper`: the upper half of a float. */
static inline ALWAYS void avx2_look_up(int rows, const Avx2Table *table, __m256i codes, __m256i upper, const float *x, int64_t x_row, int k,
                                       __m256 sums[][2])
{
    __m256i low = _mm256_shuffle_epi8(table->low, codes), high = _mm256_shuffle_epi8(table->high, codes);
    UNROLLED for (int i = 0; i < 2; i++) {
        __m256i halves = i ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        __m256 numbers[2] = {(__m256)_mm256_slli_epi32(halves, 16), (__m256)_mm256_and_si256(halves, upper)};
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int j = 0; j < 2; j++) {
                const __m128 *inputs = (const __m128 *)(x + r * x_row + k + 8 * i + 4 * j);
                sums[r][j] = _mm256_fmadd_ps(_mm256_broadcast_ps(inputs), numbers[j], sums[r][j]);
            }
    }
}

/* Whether zero points of whole groups, as of `avx2_ready`, are 8. */
static inline int avx2_are_eights(const float *zeros, int64_t groups)
{
    __m128i odd = _mm_setzero_si128();
    for (int64_t g = 0; g < groups; g++)
        odd = _mm_or_si128(odd, _mm_xor_si128(_mm_loadu_si128((const __m128i *)zeros + g), _mm_set1_epi32(8)));
    return _mm_testz_si128(odd, odd);
}

/* As the others of numbers_avx2.h; a block of NVFP4 has two tables. */
static inline ALWAYS void avx2_dots_by_table(int format, int rows, const float *x, int64_t x_row, const uint8_t *const at[2],
                                            int64_t groups, int half, const float *const scales[4], __m256 *kept)
{
    int turns = format == INT4_WORDS || format == NVFP4, words = format == INT4_WORDS;
    int eights = words && avx2_are_eights(scales[2], groups + half) && avx2_are_eights(scales[3], groups + half);
    __m128i order = turns ? _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                          : _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m256i upper = _mm256_set1_epi32((int)0xffff0000), four_bits = _mm256_set1_epi8(15), turned = _mm256_broadcastsi128_si256(order);
    __m256 sums[2][2], zero = _mm256_setzero_ps();
    SETTLE(turned); /* in a register: otherwise it is made again for each block */
    SETTLE(upper);
    SETTLE(four_bits);
    UNROLLED for (int r = 0; r < rows; r++) {
        sums[r][0] = _mm256_permute2f128_ps(kept[2 * r], kept[2 * r + 1], 0x20);
        sums[r][1] = _mm256_permute2f128_ps(kept[2 * r], kept[2 * r + 1], 0x31);
    }
    for (int64_t g = 0; g < groups + half; g++, x += DYNAMIC_GROUP) {
        __m256 scale = avx2_both(scales[0] + 4 * g, scales[1] + 4 * g), second = scale;
        Avx2Table table;
        if (turns)
            second = avx2_both(scales[2] + 4 * g, scales[3] + 4 * g);
        if (words)
            zero = _mm256_cvtepi32_ps((__m256i)second);
        UNROLLED for (int c = 0; c < 2; c++)
            FETCH_FAR(at[c] + 64 * g + AVX2_AHEAD);
        UNROLLED for (int b = 0; b < 4; b++) {
            if (b == 2 && g == groups)
                break;
            if (format != NVFP4) {
                __m256 own = _mm256_permute_ps(scale, 0x55 * b);
                table = eights ? avx2_table_of_eights(own) : avx2_table_of(format, own, _mm256_permute_ps(zero, 0x55 * b));
            }
            __m256i v = _mm256_set_m128i(avx2_bytes_of(format, at[1], g, b), avx2_bytes_of(format, at[0], g, b));
            v = _mm256_shuffle_epi8(v, turned);
            __m256i low = _mm256_and_si256(v, four_bits), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), four_bits);
            __m256i codes[2] = {low, high};
            if (turns)
                codes[0] = _mm256_unpacklo_epi16(low, high), codes[1] = _mm256_unpackhi_epi16(low, high);
            UNROLLED for (int i = 0; i < 2; i++) {
                if (format == NVFP4)
                    table = avx2_table_of_fp4(_mm256_permute_ps(i ? second : scale, 0x55 * b));
                avx2_look_up(rows, &table, codes[i], upper, x, x_row, 32 * b + 16 * i, sums);
            }
        }
    }
    UNROLLED for (int r = 0; r < rows; r++) {
        kept[2 * r] = _mm256_permute2f128_ps(sums[r][0], sums[r][1], 0x20);
        kept[2 * r + 1] = _mm256_permute2f128_ps(sums[r][0], sums[r][1], 0x31);
    }
}
#define DOTS(FORMAT, format, R)                                                                                        \
    static void avx2_dots_##format##R(const float *x, int64_t x_row, const uint8_t *const at[2], int64_t groups, int half,\
                                     const float *const scales[4], __m256 *kept)                                       \
    {                                                                                                                  \
        avx2_dots_by_table(FORMAT, R, x, x_row, at, groups, half, scales, kept);                                       \
    }
#define OF(FORMAT, format, B, P, K, S) DOTS(FORMAT, format, 1) DOTS(FORMAT, format, 2)
AVX2_BY_TABLE(OF)
#undef OF
#undef DOTS

/* Eight scales, or zero points, of which `count` are there. */
static inline ALWAYS __m256i avx2_eight_of(const uint8_t *from, int bytes, int64_t count)
{
    uint8_t room[32] = {0};
    if (count < 8)
        from = memcpy(room, from, (size_t)(count * bytes));
    return bytes == 4 ? avx2_32(from) : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
}

/* Whether `avx2_ready_words` takes these, of groups of 1, 2 or 4 blocks. */
static inline int avx2_has_few_scales(const Coded *row, int64_t k)
{
    return (row->group == 32 || row->group == 64 || row->group == 128) && k % row->group == 0 && row->kind != SCALES_E8M0;
}

/* As `avx2_ready` of numbers_avx2.h. */
static int avx2_ready_words(const Coded *row, int64_t k, int64_t blocks, float larger, float *scales, float *more)
{
    int64_t alike = row->group / DYNAMIC_BLOCK, first = k / DYNAMIC_BLOCK / alike, groups = (blocks + alike - 1) / alike;
    int bytes = scale_bytes[row->kind];
    __m256i which = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), zero = _mm256_set1_epi32(8);
    __m256 odd = _mm256_setzero_ps(), none = odd, sign = _mm256_set1_ps(-0.0f);
    for (int64_t g = 0; g < groups; g += 8) {
        int64_t count = groups < 8 ? groups : 8;
        g = g <= groups - count ? g : groups - count; /* some of the last eight again */
        __m256i v = avx2_eight_of(row->scales + (first + g) * bytes, bytes, count);
        __m256 scale = avx2_floats_of(row->kind, v), own = _mm256_andnot_ps(sign, scale);
        if (row->zeros != NULL) {
            zero = _mm256_srli_epi32(avx2_eight_of(row->zeros + 4 * (first + g), 4, count), row->zero_shift);
            zero = _mm256_and_si256(zero, _mm256_set1_epi32(15));
        }
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(own, _mm256_set1_ps(0x1p79f), _CMP_NLT_UQ));
        odd = _mm256_or_ps(odd, _mm256_and_ps(_mm256_cmp_ps(own, _mm256_set1_ps(0x1p-120f), _CMP_NGT_UQ),
                                              _mm256_cmp_ps(own, none, _CMP_NEQ_UQ)));
        scale = _mm256_mul_ps(scale, _mm256_set1_ps(larger));
        for (int64_t i = 0; i < alike; i++) { /* each as often as it has blocks */
            __m256i from = _mm256_srl_epi32(_mm256_add_epi32(which, _mm256_set1_epi32(8 * (int)i)), _mm_cvtsi32_si128((int)alike / 2));
            _mm256_storeu_ps(scales + g * alike + 8 * i, _mm256_permutevar8x32_ps(scale, from));
            _mm256_storeu_si256((__m256i *)(more + g * alike + 8 * i), _mm256_permutevar8x32_epi32(zero, from));
        }
    }
    for (int64_t b = blocks; b % 4; b++) /* of no inputs */
        scales[b] = 0, more[b] = float_of(8);
    return _mm256_testz_ps(odd, odd);
}
