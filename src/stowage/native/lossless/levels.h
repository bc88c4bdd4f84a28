/* What is done to many values at a time, in three ways: plain C, AVX2, AVX-512. All give the same bytes.

       split         words -> their exponents (`high`) and the rest (`low`): the word turned left by one bit
       join          back; `past` the caches if it can, and then `settle` has to follow before anybody looks
       is_joined     whether they are the words' halves
       write_level   values -> codes of `width` bits, bit by bit in planes, and the values that have none
       read_level    back; returns how many values had no code

   Of symbols that are the same the first one counts: only the last ones of a level are.
   A plane has a bit for each value, in groups of 64. Code 2^width - 1 says that a value is an escape. Whatever is read
   or written by groups of 64 has room for the last group. `n` is never 0. */

#ifndef STOWAGE_LEVELS_H
#define STOWAGE_LEVELS_H

#include <stdint.h>
#include <string.h>

#define WIDTH_MAX 4

typedef struct {
    const char *name;
    void (*split)(const uint8_t *words, int n, uint8_t *high, uint8_t *low);
    void (*join)(const uint8_t *high, const uint8_t *low, int n, uint8_t *words, int past);
    int (*is_joined)(const uint8_t *high, const uint8_t *low, int n, const uint8_t *words);
    void (*settle)(void);
    int (*write_level)(const uint8_t *values, int n, int width, const uint8_t *symbols, uint8_t *planes, uint8_t *rest);
    int (*read_level)(const uint8_t *planes, int n, int width, const uint8_t *table, const uint8_t *rest, uint8_t *out);
} Steps;

/* How many of a level's symbols are used. */
static inline int used_of(const uint8_t *symbols, int width) {
    int used = 1;
    while (used < (1 << width) - 1 && symbols[used] != symbols[used - 1])
        used++;
    return used;
}

static inline int groups_of(int n) { return (n + 63) / 64; }

static inline uint64_t load64(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

/* Which of the 64 values from `at` on there are. */
static inline uint64_t valid_from(int at, int n) { return n - at >= 64 ? ~0ull : (1ull << (n - at)) - 1; }

/* Blocks are too short for the hardware prefetcher. So while one is packed, the next one and the memory that it will
   be written to are prefetched, a line at a time: the processor stalls when it has too many requests in flight. */
#define BLOCK 8192 /* of words */
#define PLANES_ABOUT 1536 /* of a block; the next one's low bytes are behind them, and its planes behind those */

/* Plain C */

static void base_split(const uint8_t *words, int n, uint8_t *high, uint8_t *low) {
    for (int i = 0; i < n; i++) {
        uint16_t word = (uint16_t)(words[2 * i] | words[2 * i + 1] << 8);
        word = (uint16_t)(word << 1 | word >> 15);
        high[i] = (uint8_t)(word >> 8);
        low[i] = (uint8_t)word;
    }
}

static void base_join(const uint8_t *high, const uint8_t *low, int n, uint8_t *words, int past) {
    (void)past;
    for (int i = 0; i < n; i++) {
        uint16_t word = (uint16_t)(high[i] << 8 | low[i]);
        word = (uint16_t)(word >> 1 | word << 15);
        words[2 * i] = (uint8_t)word;
        words[2 * i + 1] = (uint8_t)(word >> 8);
    }
}

static int base_is_joined(const uint8_t *high, const uint8_t *low, int n, const uint8_t *words) {
    unsigned other = 0;
    for (int i = 0; i < n; i++) {
        unsigned word = (unsigned)(words[2 * i] | words[2 * i + 1] << 8);
        other |= ((word << 1 | word >> 15) ^ (unsigned)(high[i] << 8 | low[i])) & 0xFFFF;
    }
    return other == 0;
}

static void base_settle(void) {}

static int base_write_level(const uint8_t *values, int n, int width, const uint8_t *symbols, uint8_t *planes,
                            uint8_t *rest) {
    int groups = groups_of(n), escape = (1 << width) - 1, left = 0;
    uint8_t code_of[256];
    memset(code_of, escape, sizeof code_of);
    for (int code = 0, used = used_of(symbols, width); code < used; code++)
        code_of[symbols[code]] = (uint8_t)code;
    for (int group = 0; group < groups; group++) {
        uint64_t bits[WIDTH_MAX] = {0};
        for (int i = group * 64; i < n && i < group * 64 + 64; i++) {
            uint64_t code = code_of[values[i]];
            for (int plane = 0; plane < width; plane++)
                bits[plane] |= (code >> plane & 1) << (i & 63);
            if ((int)code == escape)
                rest[left++] = values[i];
        }
        for (int plane = 0; plane < width; plane++)
            memcpy(planes + ((size_t)plane * groups + group) * 8, bits + plane, 8);
    }
    return left;
}

static int base_read_level(const uint8_t *planes, int n, int width, const uint8_t *table, const uint8_t *rest,
                           uint8_t *out) {
    int groups = groups_of(n), escape = (1 << width) - 1, taken = 0;
    for (int group = 0; group < groups; group++) {
        uint64_t bits[WIDTH_MAX] = {0};
        for (int plane = 0; plane < width; plane++)
            bits[plane] = load64(planes + ((size_t)plane * groups + group) * 8);
        for (int i = group * 64; i < n && i < group * 64 + 64; i++) {
            int code = 0;
            for (int plane = 0; plane < width; plane++)
                code |= (int)(bits[plane] >> (i & 63) & 1) << plane;
            out[i] = code == escape && rest != NULL ? rest[taken++] : table[code];
        }
    }
    return taken;
}

static const Steps BASE_STEPS = {"base", base_split, base_join, base_is_joined, base_settle, base_write_level, base_read_level};

#if defined(__x86_64__) && defined(__GNUC__)
#define LOSSLESS_CHOICE 1
#include <immintrin.h>

/* AVX2. Eight values at a time are gathered and spread by tables of shuffles. */

static uint64_t gather8[256], spread8[256]; /* bytes of a shuffle: set bits to the front, and back (0x80 elsewhere) */

static void make_shuffles(void) {
    for (int mask = 0; mask < 256; mask++) {
        uint8_t gather[8], spread[8];
        memset(gather, 0x80, 8);
        memset(spread, 0x80, 8);
        for (int bit = 0, count = 0; bit < 8; bit++)
            if (mask >> bit & 1) {
                gather[count] = (uint8_t)bit;
                spread[bit] = (uint8_t)count++;
            }
        memcpy(gather8 + mask, gather, 8);
        memcpy(spread8 + mask, spread, 8);
    }
}

#pragma GCC push_options
#pragma GCC target("avx2,popcnt")

static void avx2_split(const uint8_t *words, int n, uint8_t *high, uint8_t *low) {
    int i = 0;
    const __m256i bytes = _mm256_set1_epi16(0xFF);
    for (; i + 32 <= n; i += 32) {
        __builtin_prefetch(words + BLOCK + 2 * i, 0, 2);
        __m256i a = _mm256_loadu_si256((const void *)(words + 2 * i));
        __m256i b = _mm256_loadu_si256((const void *)(words + 2 * i + 32));
        a = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
        b = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
        __m256i h = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        __m256i l = _mm256_packus_epi16(_mm256_and_si256(a, bytes), _mm256_and_si256(b, bytes));
        _mm256_storeu_si256((void *)(high + i), _mm256_permute4x64_epi64(h, 0xD8));
        _mm256_storeu_si256((void *)(low + i), _mm256_permute4x64_epi64(l, 0xD8));
    }
    base_split(words + 2 * i, n - i, high + i, low + i);
}

static void avx2_join(const uint8_t *high, const uint8_t *low, int n, uint8_t *words, int past) {
    int i = 0;
    past = past && (uintptr_t)words % 32 == 0;
    for (; i + 32 <= n; i += 32) {
        __m256i h = _mm256_permute4x64_epi64(_mm256_loadu_si256((const void *)(high + i)), 0xD8);
        __m256i l = _mm256_permute4x64_epi64(_mm256_loadu_si256((const void *)(low + i)), 0xD8);
        __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
        a = _mm256_or_si256(_mm256_srli_epi16(a, 1), _mm256_slli_epi16(a, 15));
        b = _mm256_or_si256(_mm256_srli_epi16(b, 1), _mm256_slli_epi16(b, 15));
        if (past) {
            _mm256_stream_si256((void *)(words + 2 * i), a);
            _mm256_stream_si256((void *)(words + 2 * i + 32), b);
        } else {
            _mm256_storeu_si256((void *)(words + 2 * i), a);
            _mm256_storeu_si256((void *)(words + 2 * i + 32), b);
        }
    }
    base_join(high + i, low + i, n - i, words + 2 * i, 0);
}

static int avx2_is_joined(const uint8_t *high, const uint8_t *low, int n, const uint8_t *words) {
    return base_is_joined(high, low, n, words); /* compiled for AVX2 here */
}

static void avx_settle(void) { _mm_sfence(); }

static int avx2_write_level(const uint8_t *values, int n, int width, const uint8_t *symbols, uint8_t *planes,
                            uint8_t *rest) {
    int groups = groups_of(n), used = used_of(symbols, width);
    uint8_t *end = rest;
    for (int group = 0; group < groups; group++) {
        __builtin_prefetch(planes + PLANES_ABOUT + group * 64, 1, 2);
        if (group < PLANES_ABOUT / 64)
            __builtin_prefetch(planes + PLANES_ABOUT + BLOCK / 2 + group * 64, 1, 2);
        uint64_t bits[WIDTH_MAX] = {0}, covered = 0, valid = valid_from(group * 64, n);
        __m256i a = _mm256_loadu_si256((const void *)(values + group * 64));
        __m256i b = _mm256_loadu_si256((const void *)(values + group * 64 + 32));
        for (int code = 0; code < used; code++) {
            __m256i symbol = _mm256_set1_epi8((char)symbols[code]);
            uint64_t here = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, symbol))
                            | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b, symbol)) << 32;
            covered |= here;
            for (int plane = 0; plane < width; plane++)
                bits[plane] |= code >> plane & 1 ? here : 0;
        }
        uint64_t escapes = valid & ~covered;
        for (int plane = 0; plane < width; plane++) {
            uint64_t whole = (bits[plane] | escapes) & valid;
            memcpy(planes + ((size_t)plane * groups + group) * 8, &whole, 8);
        }
        for (int part = 0; part < 8; part++) {
            unsigned mask = escapes >> part * 8 & 0xFF;
            __m128i eight = _mm_loadl_epi64((const void *)(values + group * 64 + part * 8));
            eight = _mm_shuffle_epi8(eight, _mm_loadl_epi64((const void *)(gather8 + mask)));
            _mm_storel_epi64((void *)end, eight);
            end += __builtin_popcount(mask);
        }
    }
    return (int)(end - rest);
}

static int avx2_read_level(const uint8_t *planes, int n, int width, const uint8_t *table, const uint8_t *rest,
                           uint8_t *out) {
    int groups = groups_of(n);
    const uint8_t *next = rest;
    const __m256i symbols = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    const __m256i each = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    for (int group = 0; group < groups; group++) {
        uint64_t bits[WIDTH_MAX], escapes = valid_from(group * 64, n);
        for (int plane = 0; plane < width; plane++) {
            bits[plane] = load64(planes + ((size_t)plane * groups + group) * 8);
            escapes &= bits[plane];
        }
        for (int half = 0; half < 2; half++) {
            __m256i code = _mm256_setzero_si256();
            for (int plane = 0; plane < width; plane++) {
                __m256i bit = _mm256_set1_epi32((int)(bits[plane] >> half * 32));
                bit = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bit, spread), each), each);
                code = _mm256_or_si256(code, _mm256_and_si256(bit, _mm256_set1_epi8((char)(1 << plane))));
            }
            _mm256_storeu_si256((void *)(out + group * 64 + half * 32), _mm256_shuffle_epi8(symbols, code));
        }
        if (rest == NULL)
            continue;
        for (int part = 0; part < 8; part++) { /* the table has 0 where an escape comes */
            unsigned mask = escapes >> part * 8 & 0xFF;
            __m128i eight = _mm_loadl_epi64((const void *)next);
            eight = _mm_shuffle_epi8(eight, _mm_loadl_epi64((const void *)(spread8 + mask)));
            uint8_t *to = out + group * 64 + part * 8;
            _mm_storel_epi64((void *)to, _mm_or_si128(eight, _mm_loadl_epi64((const void *)to)));
            next += __builtin_popcount(mask);
        }
    }
    return (int)(next - rest);
}

#pragma GCC pop_options

static const Steps AVX2_STEPS = {"avx2", avx2_split, avx2_join, avx2_is_joined, avx_settle, avx2_write_level, avx2_read_level};

/* AVX-512 with VBMI2: a plane of 64 is a mask, and bytes are gathered and spread by one instruction. */

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")

/* Every second byte of two vectors, from `first` on. */
static inline __m512i avx512_halves(int first) {
    uint8_t index[64];
    for (int i = 0; i < 64; i++)
        index[i] = (uint8_t)(2 * i + first);
    return _mm512_loadu_si512(index);
}

/* 32 words, joined from the bytes of one half of `low` and `high`. */
static inline __m512i avx512_words(__m512i low, __m512i high, __m512i half) {
    __m512i a = _mm512_permutex2var_epi8(low, half, high);
    return _mm512_shrdi_epi16(a, a, 1);
}

static inline __m512i avx512_zipped(int first) {
    uint8_t index[64];
    for (int i = 0; i < 64; i++)
        index[i] = (uint8_t)(first + i / 2 + (i & 1) * 64);
    return _mm512_loadu_si512(index);
}

static void avx512_split(const uint8_t *words, int n, uint8_t *high, uint8_t *low) {
    int i = 0;
    const __m512i even = avx512_halves(0), odd = avx512_halves(1);
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(words + BLOCK + i, 0, 2);
        __m512i a = _mm512_loadu_si512(words + 2 * i), b = _mm512_loadu_si512(words + 2 * i + 64);
        a = _mm512_shldi_epi16(a, a, 1);
        b = _mm512_shldi_epi16(b, b, 1);
        _mm512_storeu_si512(high + i, _mm512_permutex2var_epi8(a, odd, b));
        _mm512_storeu_si512(low + i, _mm512_permutex2var_epi8(a, even, b));
    }
    base_split(words + 2 * i, n - i, high + i, low + i);
}

static void avx512_join(const uint8_t *high, const uint8_t *low, int n, uint8_t *words, int past) {
    int i = 0;
    const __m512i front = avx512_zipped(0), back = avx512_zipped(32);
    past = past && (uintptr_t)words % 64 == 0;
    for (; i + 64 <= n; i += 64) {
        __m512i h = _mm512_loadu_si512(high + i), l = _mm512_loadu_si512(low + i);
        __m512i a = avx512_words(l, h, front), b = avx512_words(l, h, back);
        if (past) {
            _mm512_stream_si512((void *)(words + 2 * i), a);
            _mm512_stream_si512((void *)(words + 2 * i + 64), b);
        } else {
            _mm512_storeu_si512(words + 2 * i, a);
            _mm512_storeu_si512(words + 2 * i + 64, b);
        }
    }
    base_join(high + i, low + i, n - i, words + 2 * i, 0);
}

static int avx512_is_joined(const uint8_t *high, const uint8_t *low, int n, const uint8_t *words) {
    int i = 0;
    const __m512i front = avx512_zipped(0), back = avx512_zipped(32);
    __m512i other = _mm512_setzero_si512();
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(words + BLOCK + BLOCK / 2 + i, 0, 2);
        __m512i h = _mm512_loadu_si512(high + i), l = _mm512_loadu_si512(low + i);
        __m512i a = _mm512_xor_si512(avx512_words(l, h, front), _mm512_loadu_si512(words + 2 * i));
        __m512i b = _mm512_xor_si512(avx512_words(l, h, back), _mm512_loadu_si512(words + 2 * i + 64));
        other = _mm512_or_si512(other, _mm512_or_si512(a, b));
    }
    return _mm512_test_epi8_mask(other, other) == 0 && base_is_joined(high + i, low + i, n - i, words + 2 * i);
}

static int avx512_write_level(const uint8_t *values, int n, int width, const uint8_t *symbols, uint8_t *planes,
                              uint8_t *rest) {
    int groups = groups_of(n), escape = (1 << width) - 1;
    uint8_t code_of[256], *end = rest;
    memset(code_of, escape, sizeof code_of);
    for (int code = used_of(symbols, width) - 1; code >= 0; code--)
        code_of[symbols[code]] = (uint8_t)code;
    const __m512i table0 = _mm512_loadu_si512(code_of), table1 = _mm512_loadu_si512(code_of + 64);
    const __m512i table2 = _mm512_loadu_si512(code_of + 128), table3 = _mm512_loadu_si512(code_of + 192);
    for (int group = 0; group < groups; group++) {
        __builtin_prefetch(planes + PLANES_ABOUT + group * 64, 1, 2);
        if (group < PLANES_ABOUT / 64)
            __builtin_prefetch(planes + PLANES_ABOUT + BLOCK / 2 + group * 64, 1, 2);
        uint64_t valid = valid_from(group * 64, n), escapes = valid;
        __m512i some = _mm512_loadu_si512(values + group * 64);
        __m512i code = _mm512_permutex2var_epi8(table0, some, table1);
        code = _mm512_mask_mov_epi8(code, _mm512_movepi8_mask(some), _mm512_permutex2var_epi8(table2, some, table3));
        for (int plane = 0; plane < width; plane++) {
            uint64_t bits = _mm512_mask_test_epi8_mask(valid, code, _mm512_set1_epi8((char)(1 << plane)));
            escapes &= bits;
            memcpy(planes + ((size_t)plane * groups + group) * 8, &bits, 8);
        }
        _mm512_storeu_si512(end, _mm512_maskz_compress_epi8(escapes, some)); /* to memory alone it is slow on Zen 4 */
        end += __builtin_popcountll(escapes);
    }
    return (int)(end - rest);
}

static int avx512_read_level(const uint8_t *planes, int n, int width, const uint8_t *table, const uint8_t *rest,
                             uint8_t *out) {
    int groups = groups_of(n);
    const uint8_t *next = rest;
    const __m512i symbols = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    for (int group = 0; group < groups; group++) {
        uint64_t escapes = valid_from(group * 64, n);
        __m512i code = _mm512_setzero_si512();
        for (int plane = 0; plane < width; plane++) {
            uint64_t bits = load64(planes + ((size_t)plane * groups + group) * 8);
            escapes &= bits;
            code = _mm512_mask_add_epi8(code, bits, code, _mm512_set1_epi8((char)(1 << plane)));
        }
        code = _mm512_shuffle_epi8(symbols, code);
        if (rest != NULL) {
            code = _mm512_mask_expand_epi8(code, escapes, _mm512_loadu_si512(next));
            next += __builtin_popcountll(escapes);
        }
        _mm512_storeu_si512(out + group * 64, code);
    }
    return (int)(next - rest);
}

#pragma GCC pop_options

static const Steps AVX512_STEPS = {"avx512", avx512_split, avx512_join, avx512_is_joined, avx_settle, avx512_write_level, avx512_read_level};
#endif

#endif
