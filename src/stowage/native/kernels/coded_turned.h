/* Of GPTQ and AWQ an output's codes lie far apart: those of some outputs are laid out again as int4 has them, in the
 * second cache, before they are used.
 */

/* to[i] has word i of all, for 16 vectors of 16 words. */
static inline ALWAYS void coded_transpose(__m512i v[16])
{
    __m512i t[16];
    UNROLLED for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    UNROLLED for (int i = 0; i < 4; i++)
        UNROLLED for (int j = 0; j < 2; j++) {
            v[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            v[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
    UNROLLED for (int i = 0; i < 2; i++)
        UNROLLED for (int j = 0; j < 4; j++) {
            t[8 * i + j] = _mm512_shuffle_i32x4(v[8 * i + j], v[8 * i + 4 + j], 0x88);
            t[8 * i + 4 + j] = _mm512_shuffle_i32x4(v[8 * i + j], v[8 * i + 4 + j], 0xdd);
        }
    UNROLLED for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    }
}

/* Of GPTQ: a word has eight inputs of an output, and its neighbour the next output. */
static void coded_turn_gptq(const Linear *job, int64_t n, int64_t wide, int64_t k, int64_t depth, uint8_t *to,
                            int64_t stride)
{
    const uint32_t *from = (const uint32_t *)job->w + k / 8 * job->outputs + n;
    for (int64_t word = 0; word < depth / 8; word += 16) {
        int words = depth / 8 - word < 16 ? (int)(depth / 8 - word) : 16;
        for (int64_t o = 0; o < wide; o += 16) {
            __mmask16 there = wide - o < 16 ? (__mmask16)((1 << (wide - o)) - 1) : 0xffff;
            __m512i v[16];
            for (int i = 0; i < 16; i++) {
                const uint32_t *at = from + (word + i) * job->outputs + o;
                v[i] = i < words ? _mm512_maskz_loadu_epi32(there, at) : _mm512_setzero_si512();
                FETCH_FAR(at + 16 * job->outputs);
            }
            coded_transpose(v);
            for (int i = 0; i < 16 && o + i < wide; i++)
                _mm512_mask_storeu_epi32(to + (o + i) * stride + 4 * word, (__mmask16)((1 << words) - 1), v[i]);
        }
    }
}

/* to[i] has half byte i of the words of all, for 8 vectors: a code each. */
static inline ALWAYS void coded_transpose_codes(__m512i v[8])
{
    UNROLLED for (int stage = 0; stage < 3; stage++) {
        int apart = 1 << stage;
        __m512i keep = _mm512_set1_epi32(stage == 0 ? 0x0f0f0f0f : stage == 1 ? 0x00ff00ff : 0x0000ffff);
        UNROLLED for (int i = 0; i < 8; i++)
            if (!(i & apart)) {
                __m512i a = v[i], b = v[i + apart];
                v[i] = _mm512_ternarylogic_epi32(keep, a, _mm512_slli_epi32(b, 4 * apart), 0xca);
                v[i + apart] = _mm512_ternarylogic_epi32(keep, _mm512_srli_epi32(a, 4 * apart), b, 0xca);
            }
    }
}

/* Of AWQ: a word has eight outputs of an input. Up to 32 outputs. */
static void coded_turn_awq(const Linear *job, int64_t n, int64_t wide, int64_t k, int64_t depth, uint8_t *to,
                           int64_t stride)
{
    const __m512i column = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t across = job->outputs / 8;
    __mmask8 there = (__mmask8)((1 << wide / 8) - 1);
    for (const uint32_t *from = (const uint32_t *)job->w + k * across + n / 8; depth > 0; depth -= 32, to += 16) {
        __m512i v[8];
        UNROLLED for (int i = 0; i < 8; i++) {
            const uint32_t *at = from + i * across;
            v[i] = _mm512_castsi128_si512(_mm_maskz_loadu_epi32(there, at));
            v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi32(there, at + 8 * across), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi32(there, at + 16 * across), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_maskz_loadu_epi32(there, at + 24 * across), 3);
            for (int far = 64; far < 96; far += 8)
                FETCH_FAR(at + far * across);
        }
        from += 32 * across;
        coded_transpose_codes(v);
        for (int o = 0; o < 8; o++) {
            __m512i words = _mm512_permutexvar_epi32(column, v[awq_nibbles[o]]);
            uint8_t *own = to + o * stride;
            _mm_storeu_si128((__m128i *)own, _mm512_castsi512_si128(words));
            if (there & 2)
                _mm_storeu_si128((__m128i *)(own + 8 * stride), _mm512_extracti32x4_epi32(words, 1));
            if (there & 4)
                _mm_storeu_si128((__m128i *)(own + 16 * stride), _mm512_extracti32x4_epi32(words, 2));
            if (there & 8)
                _mm_storeu_si128((__m128i *)(own + 24 * stride), _mm512_extracti32x4_epi32(words, 3));
        }
    }
}
