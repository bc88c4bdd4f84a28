/* The shape in which a block's exponents take fewest bytes: so many levels of symbols, the most frequent first. */

#ifndef STOWAGE_SHAPE_H
#define STOWAGE_SHAPE_H

#include "levels.h"

#define LEVELS_MAX 8
#define SYMBOLS_MAX 64 /* no block that is worth coding has more symbols with a code */
#define LEVEL_HEADER 4
#define SAMPLED 4
#define COUNTED_WHOLE 1024
#define FOUND_MAX 96  /* with more symbols it is noise, which is not worth a closer look */
#define LEVEL_COST 16 /* bytes that one more level has to save: it costs time */

enum { STORED, BFLOAT16, FLOAT16, FLOAT32 };

typedef struct {
    int levels, widths[LEVELS_MAX], bytes; /* of levels, with what comes before and after them */
    uint8_t symbols[SYMBOLS_MAX];          /* from the most frequent on, as the levels take them */
} Shape;

static inline int plane_bytes(int n) { return groups_of(n) * 8; }

/* The symbols by count, and how many there are; FOUND_MAX + 1 for more. Among equals the smaller one comes first. */
static int in_order(const uint32_t *counts, uint8_t *symbols) {
    int found = 0;
    for (int symbol = 0; symbol < 256; symbol++)
        found += counts[symbol] != 0;
    if (found > FOUND_MAX)
        return FOUND_MAX + 1;
    found = 0;
    for (int symbol = 0; symbol < 256; symbol++) {
        if (counts[symbol] == 0)
            continue;
        int at = found++;
        for (; at > 0 && counts[symbols[at - 1]] < counts[symbol]; at--)
            symbols[at] = symbols[at - 1];
        symbols[at] = (uint8_t)symbol;
    }
    return found;
}

/* Chooses the levels that take fewest bytes for `n` values, by dynamic programming from the last symbol back. */
static void choose_levels(const uint32_t *counts, int n, Shape *shape) {
    uint8_t symbols[256];
    int left[SYMBOLS_MAX + 16], cost[SYMBOLS_MAX + 16], width[SYMBOLS_MAX + 16], depth[SYMBOLS_MAX + 16];
    int found = in_order(counts, symbols), last = found < SYMBOLS_MAX ? found : SYMBOLS_MAX, all = 0;
    if (found > FOUND_MAX) {
        shape->levels = 0;
        shape->bytes = n;
        return;
    }
    memset(shape->symbols, symbols[last - 1], SYMBOLS_MAX); /* what is repeated fills a level up, and is not used */
    memcpy(shape->symbols, symbols, (size_t)last);
    for (int i = last; i < found; i++)
        all += (int)counts[symbols[i]];
    for (int at = SYMBOLS_MAX + 15; at >= 0; at--) {
        if (at < last)
            all += (int)counts[symbols[at]];
        left[at] = all;
        cost[at] = all;
        width[at] = depth[at] = 0;
        if (at > last || all == 0)
            continue;
        for (int bits = 1; bits <= WIDTH_MAX; bits++) {
            int after = at + (1 << bits) - 1;
            if (after > SYMBOLS_MAX || depth[after] == LEVELS_MAX)
                continue;
            int whole = bits * plane_bytes(left[at]) + LEVEL_HEADER + (1 << bits) - 1 + LEVEL_COST + cost[after];
            if (whole < cost[at]) {
                cost[at] = whole;
                width[at] = bits;
                depth[at] = depth[after] + 1;
            }
        }
    }
    shape->levels = depth[0];
    shape->bytes = cost[0] - LEVEL_COST * depth[0];
    for (int at = 0, level = 0; level < shape->levels; level++) {
        shape->widths[level] = width[at];
        at += (1 << width[at]) - 1;
    }
}

/* Counts a quarter of the values, in groups of 64: enough, and counting is the slowest part. Short blocks: all. */
static void count_values(const uint8_t *values, int n, uint32_t even[256], uint32_t odd[256]) {
    uint32_t more[2][256];
    int step = n >= COUNTED_WHOLE ? 64 * SAMPLED : 64, weight = step / 64;
    memset(even, 0, sizeof more[0]);
    memset(odd, 0, sizeof more[0]);
    memset(more, 0, sizeof more);
    for (int group = 0; group < n; group += step) {
        int i = group, end = n - group < 64 ? n : group + 64;
        for (; i + 4 <= end; i += 4) {
            even[values[i]]++;
            odd[values[i + 1]]++;
            more[0][values[i + 2]]++;
            more[1][values[i + 3]]++;
        }
        for (; i < end; i++)
            (i & 1 ? odd : even)[values[i]]++;
    }
    for (int i = 0; i < 256; i++) {
        even[i] = (even[i] + more[0][i]) * (uint32_t)weight;
        odd[i] = (odd[i] + more[1][i]) * (uint32_t)weight;
    }
}

/* The kind of block that takes fewest bytes. `bytes`: the estimated length of its body. */
static int choose(const uint8_t *high, int n, Shape *shape) {
    uint32_t even[256], odd[256], all[256];
    count_values(high, n, even, odd);
    for (int i = 0; i < 256; i++)
        all[i] = even[i] + odd[i];
    choose_levels(all, n, shape);
    shape->bytes += n;
    int kind = BFLOAT16;
    if (4 * shape->bytes <= 3 * 2 * n)
        return kind;
    Shape other;
    if (n % 2 == 0) {
        choose_levels(odd, n / 2, &other);
        other.bytes += n + n / 2;
        if (other.bytes < shape->bytes) {
            *shape = other;
            kind = FLOAT32;
        }
    }
    memset(all, 0, sizeof all);
    for (int i = 0; i < 256; i++)
        all[i & 0xF8] += even[i] + odd[i];
    choose_levels(all, n, &other);
    other.bytes += n + 3 * plane_bytes(n);
    if (other.bytes < shape->bytes) {
        *shape = other;
        kind = FLOAT16;
    }
    return shape->bytes < 2 * n ? kind : STORED;
}

#endif
