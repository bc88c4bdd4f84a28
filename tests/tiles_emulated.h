/* Tiles as a processor with AMX has them, in plain C: what native/kernels/tiles.h is compiled with for tests.
 *
 * Palette 1, tiles of 16 rows of 64 bytes. A product is as Intel's reference of the instruction set has TDPBF16PS: sums
 * of even and of odd places in float32, each product fused with its sum, from 0; numbers below the normal ones are 0.
 * With TILES_CHAINED another order: every product onto the result itself, one after the other. */
#include <pmmintrin.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local unsigned char tiles_emulated[8][16][64];
static _Thread_local int tiles_configured;
static int tiles_chained;

static float tiles_wide(const unsigned char *half)
{
    unsigned char bytes[4] = {0, 0, half[0], half[1]};
    float value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static __attribute__((noinline)) void tiles_emulate_row(float *sums, const unsigned char *row, unsigned char b[16][64])
{
    for (int n = 0; n < 16; n++) {
        float even = 0, odd = 0;
        for (int k = 0; k < 16; k++) {
            float *at[2] = {tiles_chained ? sums + n : &even, tiles_chained ? sums + n : &odd};
            for (int i = 0; i < 2; i++)
                *at[i] = __builtin_fmaf(tiles_wide(row + 4 * k + 2 * i), tiles_wide(b[k] + 4 * n + 2 * i), *at[i]);
        }
        if (!tiles_chained)
            sums[n] += even + odd;
    }
}

static void tiles_emulate(int sums, int a, int b)
{
    unsigned before = _mm_getcsr();
    if (!tiles_configured)
        abort(); /* an invalid instruction */
    _mm_setcsr(before | 0x8040);
    for (int m = 0; m < 16; m++)
        tiles_emulate_row((float *)tiles_emulated[sums][m], tiles_emulated[a][m], tiles_emulated[b]);
    _mm_setcsr(before);
}

#define TILES_BEGIN()                                                                                                  \
    (tiles_shape.palette != 1 || tiles_shape.rows[7] != 16 || tiles_shape.row_bytes[7] != 64 ? abort() : (void)0,      \
     memset(tiles_emulated, 0, sizeof tiles_emulated), tiles_configured = 1)
#define TILES_END() (memset(tiles_emulated, 255, sizeof tiles_emulated), tiles_configured = 0)
#define TILE_ZERO(tile) memset(tiles_emulated[tile], 0, 1024)
#define TILE_LOAD(tile, from) memcpy(tiles_emulated[tile], from, 1024)
#define TILE_STORE(tile, to) memcpy(to, tiles_emulated[tile], 1024)
#define TILE_MULTIPLY(sums, a, b) tiles_emulate(sums, a, b)
