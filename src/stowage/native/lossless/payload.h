/* A whole payload in the lossless code: a head, and block after block; docs/format.md, "Packed payload". */

#ifndef STOWAGE_PAYLOAD_H
#define STOWAGE_PAYLOAD_H

#include "block.h"

#include <stddef.h>

#define HEAD 16 /* "STLC", the number of the code (u16), 0 (u16), the raw length (u64) */
#define NEAR 4096  /* Blocks are too short for the hardware prefetcher. So while one is unpacked, so many bytes from */
#define AHEAD 8192 /* NEAR behind it on are prefetched: most of them twice, since some prefetches are dropped. */
#define PADDING 4096 /* fewer bytes of anything may follow the last block */

#define PAST_CACHES_MIN 65536 /* longer ones bypass the caches, which they would only fill */

enum { WHOLE, DAMAGED, UNKNOWN };

static const uint8_t MARK[8] = {'S', 'T', 'L', 'C', 1, 0, 0, 0};
static const Steps *steps = &BASE_STEPS;

/* Returns the packed length; 0 if it does not fit. */
static size_t pack_into(const uint8_t *source, size_t raw, uint8_t *target, size_t room, Scratch *scratch) {
    if (room < HEAD)
        return 0;
    uint64_t length = raw;
    memcpy(target, MARK, sizeof MARK);
    for (int i = 0; i < 8; i++)
        target[8 + i] = (uint8_t)(length >> 8 * i);
    size_t at = HEAD;
    Known known = {0};
    for (size_t from = 0; from < raw; from += RAW_MAX) {
        int some = raw - from < RAW_MAX ? (int)(raw - from) : RAW_MAX;
        uint8_t *coded = room - at >= CODED_MAX ? target + at : scratch->coded;
        size_t taken = (size_t)write_block(steps, scratch, source + from, some, &known, coded);
        if (taken > room - at)
            return 0;
        if (coded == scratch->coded)
            memcpy(target + at, coded, taken);
        at += taken;
    }
    return at;
}

static int unpack_blocks(const uint8_t *source, size_t length, uint8_t *target, size_t raw, Scratch *scratch) {
    if (length < HEAD || memcmp(source, MARK, 4) != 0)
        return DAMAGED;
    if (memcmp(source, MARK, sizeof MARK) != 0)
        return UNKNOWN;
    uint64_t said = 0;
    for (int i = 0; i < 8; i++)
        said |= (uint64_t)source[8 + i] << 8 * i;
    if (said != raw)
        return DAMAGED;
    const uint8_t *at = source + HEAD, *end = source + length;
    int past = raw >= PAST_CACHES_MIN;
    for (size_t to = 0; to < raw; to += RAW_MAX) {
        int some = raw - to < RAW_MAX ? (int)(raw - to) : RAW_MAX;
        if (end - at < HEADER)
            return DAMAGED;
        uint32_t body = at[4] | (uint32_t)at[5] << 8 | (uint32_t)at[6] << 16 | (uint32_t)at[7] << 24;
        if (at[2] || at[3] || body > (size_t)(end - at) - HEADER)
            return DAMAGED;
        const uint8_t *ask = at + HEADER + body, *last = end;
        if (end - ask > NEAR + AHEAD)
            last = ask + NEAR + AHEAD;
        for (ask += end - ask < NEAR ? end - ask : NEAR; ask < last; ask += 64)
            __builtin_prefetch(ask, 0, 2);
        if (!read_block(steps, scratch, at[0], at[1], at + HEADER, at + HEADER + body, target + to, some, past))
            return DAMAGED;
        at += HEADER + body;
    }
    return end - at < PADDING ? WHOLE : DAMAGED;
}

static int unpack_into(const uint8_t *source, size_t length, uint8_t *target, size_t raw, Scratch *scratch) {
    int result = unpack_blocks(source, length, target, raw, scratch);
    steps->settle(); /* also after damaged ones: the caller reads the memory next */
    return result;
}

#endif
