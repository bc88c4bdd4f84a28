/* Rows in extents of 64, each of one owner: a whole owner is forgotten by its extents.

       extent   owner, rows in use, two bits per row: live (the table leads to it), marked
       free     extents without an owner, linked

   A row whose key has a newer one, or was dropped, stays with its owner and is not live. */

#ifndef STOWAGE_ROWS_H
#define STOWAGE_ROWS_H

#include "table.h"

enum { EXTENT_BITS = 6, EXTENT = 1 << EXTENT_BITS, BLOCK_BITS = 12, BLOCK_EXTENTS = 1 << (BLOCK_BITS - EXTENT_BITS) };
enum { FREE = -1, NO_EXTENT = -1 };
static const int64_t EXTENTS_MAX = (int64_t)1 << (31 - EXTENT_BITS);

typedef struct {
    int64_t owner; /* FREE: none */
    uint64_t live, marked;
    int32_t used, next; /* `next`: of a free one */
} Extent;

typedef struct {
    PyObject_HEAD
    Table table;
    Extent **extents; /* BLOCK_EXTENTS of them for each block of records */
    int64_t blocks, room; /* blocks that there are, and how many pointers fit */
    int64_t extent_count, free_count; /* `extent_count`: those that were ever used */
    int32_t first_free;
    Py_ssize_t width; /* bytes of a row besides its key */
    int busy; /* a thread is at work without Python's lock */
} Rows;

static inline Extent *extent_of(const Rows *r, int64_t number) {
    return &r->extents[number / BLOCK_EXTENTS][number % BLOCK_EXTENTS];
}

static inline uint64_t bit_of(int64_t row) { return (uint64_t)1 << (row % EXTENT); }

static int add_block(Rows *r) {
    if (r->blocks == r->room) {
        int64_t room = r->room == 0 ? 16 : 2 * r->room;
        void *blocks = PyMem_RawRealloc(r->table.blocks, room * sizeof *r->table.blocks);
        if (blocks != NULL)
            r->table.blocks = blocks;
        void *extents = PyMem_RawRealloc(r->extents, room * sizeof *r->extents);
        if (extents != NULL)
            r->extents = extents;
        if (blocks == NULL || extents == NULL)
            return -1;
        r->room = room;
    }
    /* Pages that were never written take no memory. Aligned to 64 bytes, a record of 64 bytes is one cache line. */
    char *records = aligned_alloc(64, r->table.record_bytes << BLOCK_BITS);
    Extent *extents = PyMem_RawMalloc(BLOCK_EXTENTS * sizeof *extents);
    if (records == NULL || extents == NULL) {
        free(records);
        PyMem_RawFree(extents);
        return -1;
    }
    r->table.blocks[r->blocks] = records;
    r->extents[r->blocks++] = extents;
    return 0;
}

/* An extent for an owner; NO_EXTENT: no memory. */
static int64_t take_extent(Rows *r, int64_t owner) {
    int64_t number = r->first_free;
    if (number != NO_EXTENT) {
        r->first_free = extent_of(r, number)->next;
        r->free_count--;
    } else {
        number = r->extent_count;
        if (number == EXTENTS_MAX || (number == r->blocks * BLOCK_EXTENTS && add_block(r) < 0))
            return NO_EXTENT;
        r->extent_count++;
    }
    *extent_of(r, number) = (Extent){owner, 0, 0, 0, NO_EXTENT};
    return number;
}

static void free_extent(Rows *r, int64_t number) {
    *extent_of(r, number) = (Extent){FREE, 0, 0, 0, r->first_free};
    r->first_free = (int32_t)number;
    r->free_count++;
}

/* Whether the row exists and is live: a key leads to it. */
static inline int is_live(const void *owner, int64_t row) {
    const Rows *r = owner;
    return 0 <= row && row < r->extent_count * EXTENT && (extent_of(r, row / EXTENT)->live & bit_of(row));
}

static inline void fetch_extent(const void *owner, int64_t row) { FETCH(extent_of(owner, row / EXTENT)); }

static void find_rows(const Rows *r, Way *way, const char *const *keys, int64_t *rows, int count) {
    find_group(&r->table, r, is_live, fetch_extent, way, keys, rows, count);
}

/* Inserts the next row of an extent, which has room. Returns 0; -1: no memory, and the row stays unused. */
static int add_row(Rows *r, int64_t number, uint32_t print, const char *key, const char *fields) {
    Extent *extent = extent_of(r, number);
    int64_t row = number * EXTENT + extent->used;
    char *record = record_of(&r->table, row);
    memcpy(record, key, KEY_BYTES);
    memcpy(record + KEY_BYTES, fields, (size_t)r->width);
    int64_t before = put(&r->table, print, row);
    if (before == FAILED)
        return -1;
    if (before != NO_ROW)
        extent_of(r, before / EXTENT)->live &= ~bit_of(before);
    extent->live |= bit_of(row);
    extent->used++;
    return 0;
}

/* Inserts rows into extents with room for them, in order. Returns 0; -1: no memory for the rest. */
static int add_rows(Rows *r, const int64_t *extents, const char *keys, const char *fields, Py_ssize_t count) {
    const char *group[GROUP];
    uint32_t prints[GROUP];
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i % GROUP == 0) {
            int some = count - i < GROUP ? (int)(count - i) : GROUP;
            for (int j = 0; j < some; j++)
                group[j] = keys + (i + j) * KEY_BYTES;
            begin_group(&r->table, group, prints, some);
        }
        while (extent_of(r, *extents)->used == EXTENT)
            extents++;
        if (add_row(r, *extents, prints[i % GROUP], group[i % GROUP], fields + i * r->width) < 0)
            return -1;
    }
    return 0;
}

/* Removes a key. Returns whether it was there. */
static int drop_key(Rows *r, uint32_t print, const char *key) {
    uint64_t *entry = find_entry(&r->table, print, key);
    if (entry == NULL)
        return 0;
    int64_t row = row_in(*entry);
    take_entry(&r->table, print, entry);
    extent_of(r, row / EXTENT)->live &= ~bit_of(row);
    return 1;
}

/* Removes all keys of an extent, and frees it. Returns how many there were. */
static int drop_extent(Rows *r, int64_t number) {
    const Extent *extent = extent_of(r, number);
    const char *keys[EXTENT];
    uint32_t prints[EXTENT];
    int count = extent->used, dropped = 0;
    for (int i = 0; i < count; i++)
        keys[i] = extent->live >> i & 1 ? record_of(&r->table, number * EXTENT + i) : NULL;
    begin_group(&r->table, keys, prints, count);
    for (int i = 0; i < count; i++)
        if (keys[i] != NULL)
            dropped += drop_key(r, prints[i], keys[i]);
    free_extent(r, number);
    return dropped;
}

static const char *wrong_with_rows(const Rows *r) {
    int64_t live = 0, unowned = 0, linked = 0;
    for (int64_t number = 0; number < r->extent_count; number++) {
        const Extent *extent = extent_of(r, number);
        unowned += extent->owner == FREE;
        if (extent->used < 0 || extent->used > EXTENT || (extent->owner == FREE && extent->used != 0))
            return "an extent with an impossible number of rows";
        for (int64_t row = 0; row < EXTENT; row++) {
            if (!(extent->live >> row & 1))
                continue;
            const char *key = record_of(&r->table, number * EXTENT + row);
            if (row >= extent->used || find_row(&r->table, print_of(key), key) != number * EXTENT + row)
                return "a live row that no key leads to";
            live++;
        }
    }
    for (int64_t number = r->first_free; number != NO_EXTENT; number = extent_of(r, number)->next)
        if (++linked > r->free_count || extent_of(r, number)->owner != FREE)
            return "a free extent that is in use, or free twice";
    if (live != r->table.count)
        return "a key whose row is not live";
    return linked == unowned && linked == r->free_count ? wrong_with(&r->table) : "a free extent is lost";
}

#endif
