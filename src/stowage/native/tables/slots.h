/* A table from keys to slots that the caller chooses; the number of slots is fixed. */

#ifndef STOWAGE_SLOTS_H
#define STOWAGE_SLOTS_H

#include "table.h"

typedef struct {
    PyObject_HEAD
    Table table;
    char *keys; /* the only block of records; pages that were never written take no memory */
    uint8_t *taken; /* per slot: a key leads to it */
    int64_t slots;
} Slots;

static inline int is_taken(const void *owner, int64_t slot) {
    const Slots *s = owner;
    return 0 <= slot && slot < s->slots && s->taken[slot];
}

static void find_slots(const Slots *s, Way *way, const char *const *keys, int64_t *slots, int count) {
    find_group(&s->table, s, is_taken, NULL, way, keys, slots, count);
}

/* Sets a key's slot. Returns 0; -1: the slot belongs to another key; FAILED: no memory. */
static int set_slot(Slots *s, uint32_t print, const char *key, int64_t slot) {
    char *record = record_of(&s->table, slot);
    if (s->taken[slot])
        return equal_keys(record, key) ? 0 : -1;
    memcpy(record, key, KEY_BYTES);
    int64_t before = put(&s->table, print, slot);
    if (before == FAILED)
        return FAILED;
    if (before != NO_ROW)
        s->taken[before] = 0;
    s->taken[slot] = 1;
    return 0;
}

/* Removes a key. Returns whether it was there. */
static int drop_slot(Slots *s, uint32_t print, const char *key) {
    uint64_t *entry = find_entry(&s->table, print, key);
    if (entry == NULL)
        return 0;
    s->taken[row_in(*entry)] = 0;
    take_entry(&s->table, print, entry);
    return 1;
}

static const char *wrong_with_slots(const Slots *s) {
    int64_t taken = 0;
    for (int64_t slot = 0; slot < s->slots; slot++) {
        if (!s->taken[slot])
            continue;
        const char *key = record_of(&s->table, slot);
        if (find_row(&s->table, print_of(key), key) != slot)
            return "a slot that no key leads to";
        taken++;
    }
    return taken == s->table.count ? wrong_with(&s->table) : "a key that leads to no slot";
}

#endif
