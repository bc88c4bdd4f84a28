/* The shapes of tiles that attention loads, as a program: 64 bytes in hexadecimal for each width of heads it is given.
 *
 * The instruction is replaced by a copy of which a compiler is told what GCC 12 is told of the instruction: that it reads
 * the first 8 bytes. So what a compiler leaves out there it leaves out here, on any processor with AVX-512. */
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>

static volatile unsigned char loaded[64];

static inline __attribute__((always_inline)) void copied(const void *shape)
{
    const void *from = shape;
    volatile void *to = loaded;
    long count = sizeof loaded;
    __asm__ volatile("rep movsb" : "+S"(from), "+D"(to), "+c"(count) : "m"(*(const void *const *)shape));
}
#define _tile_loadconfig copied
#include "../src/stowage/native/kernels/kernels.c"

int main(int count, char **widths)
{
    for (int i = 1; i < count; i++) {
        tile_scores_begin(atol(widths[i]));
        for (int byte = 0; byte < 64; byte++)
            printf("%02x", loaded[byte]);
        puts("");
    }
    return 0;
}
