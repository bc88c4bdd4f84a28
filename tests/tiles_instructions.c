/* Linear layers of many rows and of few, and attention by both ways to its scores, bit by bit, as a program without Python and without a library.
 *
 *     tiles_instructions products seed
 *
 * Both ways of the kernels to multiply in bfloat16 are asked: tiles, and pairs in vectors (AVX512_BF16). One line for
 * each product: what was multiplied, how many results of few rows differ, a hash of the results. What is no number is
 * one, whatever its bits. After four products comes an attention, whose scores must have the bits of floats. So lines of two machines can be compared. As the first process of a system it says what the
 * system knows of the processor, and switches the machine off (scripts/emulated_amx.py). */
#ifdef TILES_EMULATED_HERE
#define TILES_EMULATED "tiles_emulated.h"
#endif
#include "../src/stowage/native/kernels/kernels.c"

#include <stdio.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <termios.h>

enum { COMMON_ONES, CODES, SPREAD, LEAST, FINITE, ANY, CANCELLING, ZEROS, DENORMAL, KINDS };
static const char *const kinds[] = {"common", "codes", "spread", "near-the-least", "any-finite",
                                    "any-bits", "cancelling", "zeros", "denormal"};
static uint64_t state;

static uint64_t draw(uint64_t below)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 0x2545f4914f6cdd1d >> 11) % below;
}

static uint16_t sized(int least, int most) /* of an exponent between them */
{
    return (uint16_t)(draw(2) << 15 | (uint64_t)(127 + least + (int)draw((uint64_t)(most - least + 1))) << 7 | draw(128));
}

static uint16_t number(int kind, int weight)
{
    static const uint16_t large[] = {0x3f80, 0x4b80, 0xcb80, 0, 0xbf80, 0x3380}; /* 1, 2^24, -2^24, 0, -1, 2^-24 */
    static const uint16_t zeros[] = {0, 0x8000, 0x8000, 0x8000, 0x8000, 0xbf80, 0x0001, 0x8001};
    uint16_t any = (uint16_t)draw(1 << 16);
    switch (kind) {
    case SPREAD:
        return sized(-20, 20);
    case LEAST:
        return sized(-83, -43);
    case FINITE:
        return (any & 0x7f80) == 0x7f80 ? 0 : any;
    case ANY:
        return draw(40) ? sized(-60, 60) : any; /* else all sums are NaN */
    case CANCELLING:
        return weight ? large[draw(6)] : 0x3f80;
    case ZEROS:
        return zeros[draw(draw(4) ? 5 : 8)];
    case DENORMAL:
        return draw(3) ? any & 0x807f : sized(draw(2) ? -20 : 100, draw(2) ? 20 : 127);
    default:
        return sized(-3, 1);
    }
}

static uint32_t bits_of(const void *y, int narrow, int64_t i)
{
    uint32_t bits = narrow ? (uint32_t)((const uint16_t *)y)[i] << 16 : ((const uint32_t *)y)[i];
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits;
}

static void multiply_rows(const void *x, int64_t rows, int64_t inputs, int64_t x_row, int kind, int narrow, int threads,
                          const void *w, int64_t w_row, const float *scales, void *y, int64_t outputs)
{
    int64_t value[] = {(intptr_t)x, rows, inputs, x_row, 0, kind == CODES ? INT8_HALVES : HALVES, narrow, threads,
                       (intptr_t)w, (intptr_t)scales, (intptr_t)y, outputs, w_row, 0, 0, 0, 0};
    if (!multiply_together(value, 1))
        abort();
}

static long product(int kind)
{
    static const int edges[] = {31, 32, 33, 63, 479, 480, 481, 511, 512, 513, 1100};
    int64_t rows = draw(16) ? 1 + (int64_t)draw(80) : 511 + (int64_t)draw(20), outputs = 1 + (int64_t)draw(70);
    int64_t inputs = draw(2) ? 1 + (int64_t)draw(80) : edges[draw(sizeof edges / sizeof *edges)];
    int64_t x_row = inputs + (int64_t)draw(40), w_row = inputs + (int64_t)draw(40);
    int narrow = (int)draw(2), threads = 1 + (int)draw(3);
    uint16_t *x = malloc((size_t)(rows * x_row * 2)), *w = malloc((size_t)(outputs * w_row * 2));
    float *scales = malloc((size_t)outputs * 4), *many = malloc((size_t)(rows * outputs * 4)),
          *few = malloc((size_t)(rows * outputs * 4));
    for (int64_t i = 0; i < rows * x_row; i++)
        x[i] = number(kind, 0);
    for (int64_t i = 0; i < outputs * w_row; i++)
        w[i] = kind == CODES ? (uint16_t)draw(1 << 16) : number(kind, 1);
    for (int64_t i = 0; i < outputs; i++)
        scales[i] = (float)(1 + draw(1000)) / 999;
    multiply_rows(x, rows, inputs, x_row, kind, narrow, threads, w, w_row, scales, many, outputs);
    for (int64_t row = 0, some; row < rows; row += some) {
        some = 1 + (int64_t)draw(4);
        some = some < rows - row ? some : rows - row;
        multiply_rows(x + row * x_row, some, inputs, x_row, kind, narrow, 1, w, w_row, scales,
                      (char *)few + row * outputs * (narrow ? 2 : 4), outputs);
    }
    long differ = 0;
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < rows * outputs; i++) {
        uint32_t bits = bits_of(many, narrow, i);
        differ += bits != bits_of(few, narrow, i);
        hash = (hash ^ bits) * 1099511628211u;
    }
    printf("%s rows %d inputs %d outputs %d narrow %d threads %d: differ %ld of %d, hash %016llx\n", kinds[kind],
           (int)rows, (int)inputs, (int)outputs, narrow, threads, differ, (int)(rows * outputs),
           (unsigned long long)hash);
    free(x), free(w), free(scales), free(many), free(few);
    return differ;
}

static const float *attended(const Attention *job, const Scoring *way, int threads)
{
    scoring = way;
    if (!spread_attention(job, threads))
        abort();
    return job->out;
}

/* Of up to 70 tokens after up to 70 others, in blocks of 16 that follow each other; values are the keys. */
static long attention_of(int kind)
{
    static const int widths[] = {16, 24, 64, 80, 96, 128, 256};
    int64_t width = widths[draw(7)], fold = 1 + (int64_t)draw(3), heads = 1 + (int64_t)draw(2);
    int64_t count = 16 + (int64_t)draw(55), start = (int64_t)draw(70), blocks = (start + count + 15) / 16, table[16];
    int threads = 1 + (int)draw(3), which = (int)draw(3);
    size_t asked = (size_t)(count * heads * fold * width), kept = (size_t)(blocks * 16 * heads * width);
    uint16_t *q = malloc(asked * 2), *k = malloc(kept * 2);
    float *floats = malloc(asked * 4), *found = malloc(asked * 4);
    for (size_t i = 0; i < asked; i++)
        q[i] = number(kind, 0);
    for (size_t i = 0; i < kept; i++)
        k[i] = number(kind, 1);
    for (int64_t i = 0; i < blocks; i++)
        table[i] = i;
    Run run = {0, count, start, 0, 0};
    Blocks lie = {k, 16 * heads * width, heads * width, width, NULL, 0};
    Attention job = {q, floats, lie, lie, table, &run, NULL, 1, heads, fold, width, width, 16, 40, which, 0.125f,
                     draw(3) ? 0 : 20, 1};
    const Scoring *way = scoring;
    attended(&job, NULL, 1);
    job.out = found;
    attended(&job, way, threads);
    long differ = 0;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < asked; i++) {
        uint32_t bits = bits_of(found, 0, (int64_t)i);
        differ += bits != bits_of(floats, 0, (int64_t)i);
        hash = (hash ^ bits) * 1099511628211u;
    }
    printf("%s attention kind %d heads %d x %d of %d tokens %d after %d threads %d: differ %ld of %ld, hash %016llx\n",
           kinds[kind], which, (int)heads, (int)fold, (int)width, (int)count, (int)start, threads, differ, (long)asked,
           (unsigned long long)hash);
    free(q), free(k), free(floats), free(found);
    return differ;
}

static void show_processor(void)
{
    char line[16384];
    mkdir("/proc", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, "model name", 10) == 0 || strncmp(line, "flags", 5) == 0)
            fputs(line, stdout);
}

int main(int count, char **argument)
{
    static const char *const ways[] = {"amx_bf16", "avx512_bf16"};
    int first = getpid() == 1;
    long all = 0, products = count > 2 ? atol(argument[count - 2]) : 0; /* Linux puts its own before */
    if (first)
        show_processor();
    for (int way = 0; way < 2; way++) {
        if (products < 1 || choose(ways[way]) < 0) {
            printf("%s: not on this machine\n", ways[way]);
            all++;
            continue;
        }
        long differ = 0;
        state = strtoull(argument[count - 1], NULL, 10) * 0x9e3779b97f4a7c15 + 1;
        for (long i = 0; i < products; i++)
            differ += (i % 5 < 4 ? product((int)(i % KINDS)) : attention_of((int)(i % KINDS))) != 0;
        printf("%s: %ld products, results of few rows differ in %ld\n", ways[way], products, differ);
        all += differ;
    }
    fflush(stdout);
    if (first) {
        tcdrain(1);
        reboot(RB_POWER_OFF);
    }
    return all != 0;
}
