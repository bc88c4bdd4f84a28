/* One block of the lossless code: up to 4,096 words of 16 bits; docs/format.md, "Packed payload".

   What is read is checked against where it ends before it is read; what is written goes into memory of this file, which
   has room for the largest block, until a block is known to be whole. So no bytes make it read or write elsewhere. */

#ifndef STOWAGE_BLOCK_H
#define STOWAGE_BLOCK_H

#include "shape.h"

#define WORDS_MAX 4096
#define RAW_MAX (2 * WORDS_MAX)
#define HEADER 8
#define SERVED 15 /* blocks that take over the shape of one before them */
#define WORSE 32  /* while they take at most one part in so many more bytes than it took */
#define RESTING 3 /* after a block that took more, so many blocks each get a shape of their own */
#define ROOM (WORDS_MAX + 64)
#define CODED_MAX (4 * RAW_MAX) /* room for LEVELS_MAX levels of WIDTH_MAX planes, and all else of a block */

typedef struct {
    uint8_t high[ROOM], low[ROOM], values[2][ROOM], words[RAW_MAX + 64], coded[CODED_MAX];
} Scratch;

static const uint8_t EIGHT[16] = {0, 1, 2, 3, 4, 5, 6, 7};

/* Codes `n` values of `high` by the shape; `at` is where levels begin in `coded`. Returns where all ends. */
static int write_levels(const Steps *steps, Scratch *scratch, uint8_t *coded, int n, const Shape *shape, int header,
                        int at) {
    const uint8_t *values = scratch->high, *symbols = shape->symbols;
    for (int level = 0; level < shape->levels; level++) {
        int width = shape->widths[level], escape = (1 << width) - 1;
        uint8_t *rest = scratch->values[level & 1];
        int left = n == 0 ? 0 : steps->write_level(values, n, width, symbols, coded + at, rest);
        at += width * plane_bytes(n);
        coded[header] = (uint8_t)width;
        coded[header + 1] = 0;
        coded[header + 2] = (uint8_t)left;
        coded[header + 3] = (uint8_t)(left >> 8);
        memcpy(coded + header + LEVEL_HEADER, symbols, (size_t)escape);
        header += LEVEL_HEADER + escape;
        symbols += escape;
        values = rest;
        n = left;
    }
    memcpy(coded + at, values, (size_t)n);
    return at + n;
}

typedef struct {
    int width, n;
    const uint8_t *symbols, *planes;
} Level;

/* Reads `n` values into `scratch->high`. `at`: the levels' headers; `*body`: their data. Returns 0 for anything that
   the writer would not write. */
static int read_levels(const Steps *steps, Scratch *scratch, int n, int count, const uint8_t *at, const uint8_t **body,
                       const uint8_t *end) {
    Level levels[LEVELS_MAX];
    for (int i = 0; i < count; i++) { /* the headers were found to lie within the block */
        Level *level = levels + i;
        level->width = at[0];
        level->n = n;
        level->symbols = at + LEVEL_HEADER;
        level->planes = *body;
        if (end - *body < level->width * plane_bytes(n))
            return 0;
        *body += level->width * plane_bytes(n);
        int left = at[2] | at[3] << 8;
        if (left > n)
            return 0;
        n = left;
        at += LEVEL_HEADER + (1 << level->width) - 1;
    }
    if (end - *body < n)
        return 0;
    uint8_t *rest = count ? scratch->values[count & 1] : scratch->high;
    memcpy(rest, *body, (size_t)n);
    *body += n;
    for (int i = count - 1; i >= 0; i--) {
        const Level *level = levels + i;
        uint8_t table[16] = {0}, *out = i ? scratch->values[i & 1] : scratch->high;
        memcpy(table, level->symbols, (size_t)((1 << level->width) - 1));
        int taken = level->n ? steps->read_level(level->planes, level->n, level->width, table, rest, out) : 0;
        if (taken != n)
            return 0;
        n = level->n;
        rest = out;
    }
    return 1;
}

typedef struct {
    int n;                            /* words that are split: their exponents are in `scratch->high` */
    const uint8_t *low, *even, *last; /* the rest of them; words between them, of FLOAT32; an odd byte */
} Halves;

/* Reads the body of a block that is not STORED, [source, end), of `raw` bytes. Returns 0 unless it is whole. */
static int read_halves(const Steps *steps, Scratch *scratch, int kind, int count, const uint8_t *source,
                       const uint8_t *end, int raw, Halves *halves) {
    int words = raw / 2, n = kind == FLOAT32 ? words / 2 : words;
    if (kind > FLOAT32 || count > LEVELS_MAX || n == 0 || (kind == FLOAT32 && words % 2))
        return 0;
    const uint8_t *headers = source;
    for (int level = 0; level < count; level++) {
        if (end - source < LEVEL_HEADER || source[0] < 1 || source[0] > WIDTH_MAX)
            return 0;
        int length = LEVEL_HEADER + (1 << source[0]) - 1;
        if (end - source < length)
            return 0;
        source += length;
    }
    int even_bytes = kind == FLOAT32 ? 2 * n : 0, kept_bytes = kind == FLOAT16 ? 3 * plane_bytes(n) : 0;
    if (end - source < even_bytes + n + kept_bytes)
        return 0;
    const uint8_t *even = source, *low = even + even_bytes, *kept = low + n;
    source = kept + kept_bytes;
    if (!read_levels(steps, scratch, n, count, headers, &source, end) || end - source != raw % 2)
        return 0;
    if (kind == FLOAT16) {
        steps->read_level(kept, n, 3, EIGHT, NULL, scratch->values[0]);
        for (int i = 0; i < n; i++)
            scratch->high[i] |= scratch->values[0][i];
    }
    *halves = (Halves){n, low, even, source};
    return 1;
}

/* Reads the body of a block into `target`, `raw` bytes. `past`: see `join`. Returns 0 unless it is whole. */
static int read_block(const Steps *steps, Scratch *scratch, int kind, int count, const uint8_t *source,
                      const uint8_t *end, uint8_t *target, int raw, int past) {
    Halves halves;
    if (kind == STORED) {
        if (end - source != raw || count)
            return 0;
        memcpy(target, source, (size_t)raw);
        return 1;
    }
    if (!read_halves(steps, scratch, kind, count, source, end, raw, &halves))
        return 0;
    if (kind == FLOAT32) {
        steps->join(scratch->high, halves.low, halves.n, scratch->words, 0);
        for (int i = 0; i < halves.n; i++) {
            memcpy(target + 4 * i, halves.even + 2 * i, 2);
            memcpy(target + 4 * i + 2, scratch->words + 2 * i, 2);
        }
    } else {
        steps->join(scratch->high, halves.low, halves.n, target, past);
    }
    if (raw % 2)
        target[raw - 1] = *halves.last;
    return 1;
}

/* Whether the body of a block that is not STORED gives these `raw` bytes. */
static int gives_back(const Steps *steps, Scratch *scratch, int kind, int count, const uint8_t *source,
                      const uint8_t *end, const uint8_t *words, int raw) {
    Halves halves;
    if (!read_halves(steps, scratch, kind, count, source, end, raw, &halves)
        || (raw % 2 && words[raw - 1] != *halves.last))
        return 0;
    if (kind != FLOAT32)
        return steps->is_joined(scratch->high, halves.low, halves.n, words);
    int other = 0;
    steps->join(scratch->high, halves.low, halves.n, scratch->words, 0);
    for (int i = 0; i < halves.n; i++)
        other |= memcmp(words + 4 * i, halves.even + 2 * i, 2) | memcmp(words + 4 * i + 2, scratch->words + 2 * i, 2);
    return other == 0;
}

/* A shape that was chosen for one block and is reused: choosing takes a quarter of the time of packing. */
typedef struct {
    Shape shape;
    int uses, most; /* for so many blocks more, while their bodies take no more bytes than that */
    int rest;       /* so many blocks get a shape of their own before one is reused again */
} Known;

/* Codes a block that was split, by the shape. Returns where it ends in `coded`. */
static int code_block(const Steps *steps, Scratch *scratch, uint8_t *coded, const uint8_t *source, int raw, int kind,
                      const Shape *shape) {
    int n = raw / 2, header = HEADER, at = HEADER;
    for (int level = 0; level < shape->levels; level++)
        at += LEVEL_HEADER + (1 << shape->widths[level]) - 1;
    if (kind == FLOAT32) {
        n /= 2;
        for (int i = 0; i < n; i++)
            memcpy(coded + at + 2 * i, source + 4 * i, 2);
        at += 2 * n;
        for (int i = 0; i < n; i++) {
            scratch->high[i] = scratch->high[2 * i + 1];
            scratch->low[i] = scratch->low[2 * i + 1];
        }
    }
    memcpy(coded + at, scratch->low, (size_t)n);
    at += n;
    if (kind == FLOAT16) {
        for (int i = 0; i < n; i++) {
            scratch->values[0][i] = scratch->high[i] & 7;
            scratch->high[i] &= 0xF8;
        }
        steps->write_level(scratch->values[0], n, 3, EIGHT, coded + at, scratch->values[1]);
        at += 3 * plane_bytes(n);
    }
    at = write_levels(steps, scratch, coded, n, shape, header, at);
    if (raw % 2)
        coded[at++] = source[raw - 1];
    return at;
}

/* The same by the reused shape, or a new one. `*kind`: STORED if neither saves bytes. */
static int code_known(const Steps *steps, Scratch *scratch, uint8_t *coded, const uint8_t *source, int raw, Known *known,
                      Shape *shape, int *kind) {
    int whole = raw == RAW_MAX;
    *kind = BFLOAT16;
    if (whole && known->uses > 0) {
        *shape = known->shape;
        int at = code_block(steps, scratch, coded, source, raw, BFLOAT16, shape);
        known->uses--;
        if (at <= known->most)
            return at;
        known->uses = 0;
        known->rest = RESTING;
    }
    *kind = choose(scratch->high, raw / 2, shape);
    if (*kind == STORED)
        return HEADER;
    int at = code_block(steps, scratch, coded, source, raw, *kind, shape);
    if (known->rest > 0) {
        known->rest--;
    } else if (whole && *kind == BFLOAT16) {
        known->shape = *shape;
        known->uses = SERVED;
        known->most = at + at / WORSE;
    }
    return at;
}

/* Writes one block of `raw` bytes into `coded`, CODED_MAX bytes, its header first. Returns its length. What is coded is
   read back and compared: should memory have flipped a bit, or this code be wrong, the block is stored as it is. */
static int write_block(const Steps *steps, Scratch *scratch, const uint8_t *source, int raw, Known *known,
                       uint8_t *coded) {
    int kind = STORED, at = HEADER;
    Shape shape = {0};
    if (raw > 1) {
        steps->split(source, raw / 2, scratch->high, scratch->low);
        at = code_known(steps, scratch, coded, source, raw, known, &shape, &kind);
    }
    if (kind != STORED
        && (at >= HEADER + raw
            || !gives_back(steps, scratch, kind, shape.levels, coded + HEADER, coded + at, source, raw)))
        kind = STORED;
    if (kind == STORED) {
        shape.levels = 0;
        memcpy(coded + HEADER, source, (size_t)raw);
        at = HEADER + raw;
    }
    uint32_t length = (uint32_t)(at - HEADER);
    uint8_t header[HEADER] = {(uint8_t)kind,           (uint8_t)shape.levels,   0, 0, (uint8_t)length,
                              (uint8_t)(length >> 8), (uint8_t)(length >> 16), (uint8_t)(length >> 24)};
    memcpy(coded, header, HEADER);
    return at;
}

#endif
