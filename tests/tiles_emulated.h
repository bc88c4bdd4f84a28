/* Tiles as a processor with AMX has them, in plain C: what native/kernels/tiles.h and tile_scores.h are compiled with for
 * tests.
 *
 * Palette 1, eight tiles of up to 16 rows of 64 bytes, of the sizes that they are configured with. A product is as
 * Intel's reference of the instruction set has TDPBF16PS: sums of even and of odd places in float32, each product fused
 * with its sum, from 0; numbers below the normal ones are 0. What is not configured, or does not fit, ends the program.
 * With tiles_chained another order: every product onto the result itself, one after the other. */
#include <pmmintrin.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local unsigned char tiles_emulated[8][16][64];
static _Thread_local struct {
    int rows, row_bytes;
} tiles_sizes[8];
static int tiles_chained;

static float tiles_wide(const unsigned char *half)
{
    unsigned char bytes[4] = {0, 0, half[0], half[1]};
    float value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static void tiles_must(int whether) /* else the instruction is invalid */
{
    if (!whether)
        abort();
}

static __attribute__((noinline)) void tiles_emulate_row(float *sums, int count, const unsigned char *row, int pairs,
                                                        unsigned char b[16][64])
{
    for (int n = 0; n < count; n++) {
        float even = 0, odd = 0;
        for (int k = 0; k < pairs; k++) {
            float *at[2] = {tiles_chained ? sums + n : &even, tiles_chained ? sums + n : &odd};
            for (int i = 0; i < 2; i++)
                *at[i] = __builtin_fmaf(tiles_wide(row + 4 * k + 2 * i), tiles_wide(b[k] + 4 * n + 2 * i), *at[i]);
        }
        if (!tiles_chained)
            sums[n] += even + odd;
    }
}

static void tiles_must_fit(int sums, int a, int b)
{
    tiles_must(tiles_sizes[sums].rows > 0 && tiles_sizes[sums].rows == tiles_sizes[a].rows
               && tiles_sizes[sums].row_bytes == tiles_sizes[b].row_bytes
               && tiles_sizes[a].row_bytes == 4 * tiles_sizes[b].rows);
}

static void tiles_emulate(int sums, int a, int b)
{
    unsigned before = _mm_getcsr();
    tiles_must_fit(sums, a, b);
    _mm_setcsr(before | 0x8040);
    for (int m = 0; m < tiles_sizes[sums].rows; m++)
        tiles_emulate_row((float *)tiles_emulated[sums][m], tiles_sizes[sums].row_bytes / 4, tiles_emulated[a][m],
                          tiles_sizes[b].rows, tiles_emulated[b]);
    _mm_setcsr(before);
}

/* TDPBSUD: whole numbers, of bytes with a sign times bytes without. */
static void tiles_emulate_bytes(int sums, int a, int b)
{
    tiles_must_fit(sums, a, b);
    for (int m = 0; m < tiles_sizes[sums].rows; m++)
        for (int n = 0; n < tiles_sizes[sums].row_bytes / 4; n++) {
            int sum;
            memcpy(&sum, tiles_emulated[sums][m] + 4 * n, sizeof sum);
            for (int k = 0; k < tiles_sizes[a].row_bytes; k++)
                sum += (signed char)tiles_emulated[a][m][k] * tiles_emulated[b][k / 4][4 * n + k % 4];
            memcpy(tiles_emulated[sums][m] + 4 * n, &sum, sizeof sum);
        }
}

static void tiles_zero(int tile)
{
    tiles_must(tiles_sizes[tile].rows > 0);
    memset(tiles_emulated[tile], 0, 1024);
}

static void tiles_load(int tile, const void *from, long row_bytes)
{
    tiles_zero(tile);
    for (int m = 0; m < tiles_sizes[tile].rows; m++)
        memcpy(tiles_emulated[tile][m], (const char *)from + m * row_bytes, (size_t)tiles_sizes[tile].row_bytes);
}

static void tiles_store(int tile, void *to)
{
    tiles_must(tiles_sizes[tile].rows > 0);
    for (int m = 0; m < tiles_sizes[tile].rows; m++)
        memcpy((char *)to + m * 64, tiles_emulated[tile][m], (size_t)tiles_sizes[tile].row_bytes);
}

static void tiles_begin(int palette, const unsigned char *rows, const unsigned short *row_bytes)
{
    tiles_must(palette == 1);
    for (int tile = 0; tile < 8; tile++) {
        tiles_must(rows[tile] <= 16 && row_bytes[tile] <= 64 && row_bytes[tile] % 4 == 0);
        tiles_sizes[tile].rows = rows[tile];
        tiles_sizes[tile].row_bytes = row_bytes[tile];
    }
    memset(tiles_emulated, 0, sizeof tiles_emulated);
}

static void tiles_end(void)
{
    memset(tiles_sizes, 0, sizeof tiles_sizes);
    memset(tiles_emulated, 255, sizeof tiles_emulated);
}

#define TILES_BEGIN(shape) tiles_begin((shape)->palette, (shape)->rows, (shape)->row_bytes)
#define TILES_END() tiles_end()
#define TILE_ZERO(tile) tiles_zero(tile)
#define TILE_LOAD(tile, from, row_bytes) tiles_load(tile, from, row_bytes)
#define TILE_STORE(tile, to) tiles_store(tile, to)
#define TILE_MULTIPLY(sums, a, b) tiles_emulate(sums, a, b)
