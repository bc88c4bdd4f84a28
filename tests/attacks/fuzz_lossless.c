/* Packs, damages and unpacks under the sanitizers: every access outside of a payload ends the program.

   cc -g -fsanitize=address,undefined -fno-sanitize-recover -I src/stowage/native/lossless tests/attacks/fuzz_lossless.c
   ./a.out ROUNDS [SEED]; each payload lies in memory of exactly its length. */

#include "payload.h"

#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 1;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % below;
}

static void fill(uint8_t *raw, size_t length, uint32_t kind) {
    for (size_t i = 0; i < length; i++)
        raw[i] = (uint8_t)draw(256);
    uint32_t spread = 1 + draw(30);
    for (size_t i = 1; i < length && kind; i += kind == 2 ? 4 : 2)
        raw[kind == 2 && i + 2 < length ? i + 2 : i] = (uint8_t)(0x30 + draw(1 + draw(spread)));
}

static void round_trip(const Steps *way, uint8_t *raw, size_t length, Scratch *scratch) {
    steps = way;
    size_t room = length + length / 512 + 64;
    uint8_t *packed = malloc(room);
    size_t taken = pack_into(raw, length, packed, room, scratch);
    if (taken == 0)
        abort();
    uint8_t *exact = malloc(taken), *again = malloc(length ? length : 1);
    memcpy(exact, packed, taken);
    if (unpack_into(exact, taken, again, length, scratch) != WHOLE || memcmp(again, raw, length) != 0)
        abort();
    for (int times = 0; times < 8; times++) {
        size_t left = draw(5) ? taken : draw((uint32_t)taken) + 1;
        uint8_t *damaged = malloc(left);
        memcpy(damaged, packed, left);
        for (uint32_t hits = 1 + draw(6); hits > 0; hits--) {
            size_t place = draw(2) ? draw((uint32_t)left) : (left > 16 ? 16 + draw(left < 80 ? (uint32_t)left - 16 : 64) : 0);
            damaged[place] = (uint8_t)(draw(3) ? draw(256) : 0xFF);
        }
        unpack_into(damaged, left, again, length, scratch);
        free(damaged);
    }
    free(exact);
    free(again);
    free(packed);
}

int main(int count, char **words) {
    const Steps *ways[3] = {&BASE_STEPS, NULL, NULL};
    int known = 1;
#ifdef LOSSLESS_CHOICE
    make_shuffles();
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        ways[known++] = &AVX2_STEPS;
    if (__builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw"))
        ways[known++] = &AVX512_STEPS;
#endif
    long rounds = count > 1 ? atol(words[1]) : 1000;
    state = count > 2 ? (uint64_t)atol(words[2]) : 1;
    Scratch *scratch = calloc(1, sizeof(Scratch));
    for (long i = 0; i < rounds; i++) {
        size_t length = draw(3) ? draw(300) : draw(20000);
        uint8_t *raw = malloc(length ? length : 1);
        fill(raw, length, draw(3));
        round_trip(ways[i % known], raw, length, scratch);
        free(raw);
    }
    free(scratch);
    printf("%ld rounds, %d ways\n", rounds, known);
    return 0;
}
