/* y = x w^T of numbers in bfloat16 on processors that multiply whole tiles (AMX), few rows and many in one order.
 *
 *     lane l of 16 takes inputs 2l and 2l + 1 of every 32: what lane l of a vector holds when a row is read
 *     a segment is 16 such pairs, 512 inputs; what is left of the last one is filled up with zeros
 *     within a segment a lane's even inputs are summed one after the other, and its odd ones; from 0, by fused products
 *     even + odd is added to the lane; in the end the lanes are added as in `total`
 *
 * One TDPBF16PS sums a segment so, for 16 rows by 16 outputs of one lane, if pair k of its tiles comes from the
 * segment's k-th 32 inputs (Intel, Architecture Instruction Set Extensions Reference: even and odd sums of fp32 fused
 * products, then their sum onto the result; numbers below the normal ones are 0 throughout). So inputs of many rows and
 * weights are laid out lane by lane first, and each lane has a tile of sums. Few rows are multiplied with vectors of
 * float32 as weights lie in memory, under the same rule for small numbers. Whether a processor's tiles really do so is
 * tried before they are used (kernels.py).
 */
enum { TILE_SIDE = 16, TILE_BYTES = 1024, SEGMENT = 512, TILES_ROWS = 512, TILES_PANEL = 96 };

#ifdef TILES_EMULATED
#include TILES_EMULATED
#else
/* GCC 12 takes the instruction to read 8 bytes, and leaves out what was written to the other 56: all are read before. */
#define TILES_BEGIN(shape)                                                                                             \
    do {                                                                                                               \
        __asm__ volatile("" : : "m"(*(shape)));                                                                        \
        _tile_loadconfig(shape);                                                                                       \
    } while (0)
#define TILES_END() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, row_bytes) _tile_loadd(tile, from, row_bytes)
#define TILE_STORE(tile, to) _tile_stored(tile, to, 64)
#define TILE_MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)
#endif

/* Palette 1: up to eight tiles, of up to 16 rows of 64 bytes. */
typedef struct {
    uint8_t palette, start_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TilesShape;
static const TilesShape tiles_shape __attribute__((unused)) = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Tiles that products of 16 rows begin with: 4 of sums, 2 of rows and 2 of outputs, which are `words` of 4 bytes deep. */
static inline void tiles_begin_rows(int words)
{
    TilesShape shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.rows[tile] = (uint8_t)(tile < 6 ? TILE_SIDE : words);
        shape.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? 4 * words : 64);
    }
    TILES_BEGIN(&shape);
}

/* As tiles have it: what is below the normal numbers is 0. What is computed meanwhile is in functions of its own, which
 * a compiler does not move. */
#define FLUSHED 0x8040
#define APART static __attribute__((noinline))


/* 32 inputs or weights, or those of the mask and zeros, as two vectors of floats: of even indices, and of odd ones. */
static inline ALWAYS void apart_b(__mmask32 there, const uint16_t *from, __m512 *even, __m512 *odd)
{
    __m512i pairs = _mm512_maskz_loadu_epi16(there, from);
    *even = (__m512)_mm512_slli_epi32(pairs, 16);
    *odd = (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000));
}

static inline ALWAYS void apart_c(__mmask32 there, const int8_t *from, __m512 *even, __m512 *odd)
{
    __m512i pairs = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi8(there, from));
    *even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
    *odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8));
}

#define STEP(F, T, R, C, THERE)                                                                                        \
    {                                                                                                                  \
        __m512 w_even[C], w_odd[C];                                                                                    \
        UNROLLED for (int c = 0; c < C; c++) {                                                                         \
            const T *from = w + c * w_row + i;                                                                         \
            apart_##F(THERE, from, &w_even[c], &w_odd[c]);                                                             \
            FETCH_FAR(from + 2 * C * w_row);                                                                           \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++) {                                                                         \
            __m512 x_even, x_odd;                                                                                      \
            apart_b(THERE, x + r * x_row + i, &x_even, &x_odd);                                                        \
            UNROLLED for (int c = 0; c < C; c++) {                                                                     \
                even[r][c] = _mm512_fmadd_ps(x_even, w_even[c], even[r][c]);                                           \
                odd[r][c] = _mm512_fmadd_ps(x_odd, w_odd[c], odd[r][c]);                                               \
            }                                                                                                          \
        }                                                                                                              \
    }
#define TILE(F, T, R, C)                                                                                               \
    APART void few_##F##R##C(const uint16_t *x, int64_t x_row, const void *at, int64_t w_row, int64_t inputs,          \
                             float *y, int64_t y_row)                                                                  \
    {                                                                                                                  \
        const T *w = at;                                                                                               \
        __m512 lanes[R][C], even[R][C], odd[R][C];                                                                     \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                lanes[r][c] = _mm512_setzero_ps();                                                                     \
        for (int64_t begin = 0; begin < inputs; begin += SEGMENT) {                                                    \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                UNROLLED for (int c = 0; c < C; c++)                                                                   \
                    even[r][c] = odd[r][c] = _mm512_setzero_ps();                                                      \
            int64_t end = inputs - begin < SEGMENT ? inputs : begin + SEGMENT, i = begin;                              \
            for (; i + 32 <= end; i += 32)                                                                             \
                STEP(F, T, R, C, 0xffffffff)                                                                           \
            if (i < end)                                                                                               \
                STEP(F, T, R, C, ((__mmask32)1 << (end - i)) - 1)                                                      \
            int filled = end - begin <= SEGMENT - 32; /* with zeros, which make a sum of -0 one of 0 */                \
            UNROLLED for (int r = 0; r < R; r++)                                                                       \
                UNROLLED for (int c = 0; c < C; c++) {                                                                 \
                    if (filled) {                                                                                      \
                        even[r][c] = _mm512_add_ps(even[r][c], _mm512_setzero_ps());                                   \
                        odd[r][c] = _mm512_add_ps(odd[r][c], _mm512_setzero_ps());                                     \
                    }                                                                                                  \
                    lanes[r][c] = _mm512_add_ps(lanes[r][c], _mm512_add_ps(even[r][c], odd[r][c]));                    \
                }                                                                                                      \
        }                                                                                                              \
        UNROLLED for (int r = 0; r < R; r++)                                                                           \
            UNROLLED for (int c = 0; c < C; c++)                                                                       \
                y[r * y_row + c] = avx512_total((avx512_vec)lanes[r][c]);                                              \
    }
#define ROW(F, T, R) TILE(F, T, R, 1) TILE(F, T, R, 2) TILE(F, T, R, 3)
#define ALL(F, T) ROW(F, T, 1) ROW(F, T, 2) ROW(F, T, 3) ROW(F, T, 4)
ALL(b, uint16_t)
ALL(c, int8_t)
#undef ALL
#undef ROW
#undef TILE
#undef STEP

typedef void (*Few)(const uint16_t *, int64_t, const void *, int64_t, int64_t, float *, int64_t);
#define ROW(F, R) {few_##F##R##1, few_##F##R##2, few_##F##R##3}
#define ALL(F) {ROW(F, 1), ROW(F, 2), ROW(F, 3), ROW(F, 4)}
static const Few fews[2][TILES_FEW][3] = {ALL(b), ALL(c)};
#undef ALL
#undef ROW

/* The weights of output n from input k on. */
static inline const void *weights_at(const Linear *job, int64_t n, int64_t k)
{
    int shift = job->form != INT8_HALVES; /* bytes of a weight, as a power of two */
    return (const char *)job->w + ((n * job->w_row + k) << shift);
}

/* Outputs [begin, end) of all rows, a few rows at a time. */
static void few_linear(const Linear *job, int64_t begin, int64_t end)
{
    float sums[TILES_FEW * TILES_PANEL] __attribute__((aligned(64)));
    unsigned before = _mm_getcsr();
    for (int64_t first = begin; first < end; first += TILES_PANEL) {
        int64_t wide = end - first < TILES_PANEL ? end - first : TILES_PANEL;
        for (int64_t row = 0; row < job->rows; row += TILES_FEW) {
            int r = job->rows - row < TILES_FEW ? (int)(job->rows - row) : TILES_FEW;
            const uint16_t *x = (const uint16_t *)job->x + row * job->x_row;
            _mm_setcsr(before | FLUSHED);
            for (int64_t n = 0; n < wide; n += 3) {
                int c = wide - n < 3 ? (int)(wide - n) : 3;
                fews[job->form == INT8_HALVES][r - 1][c - 1](x, job->x_row, weights_at(job, first + n, 0), job->w_row,
                                                             job->inputs, sums + n, TILES_PANEL);
            }
            _mm_setcsr(before);
            for (int i = 0; i < r; i++)
                halves_finish(job, sums + i * TILES_PANEL, row + i, first, wide);
        }
    }
}

static inline int64_t segments(int64_t inputs)
{
    return (inputs + SEGMENT - 1) / SEGMENT;
}

/* Bytes of a block of 16 rows, or of 16 outputs, laid out: for each lane a tile for each segment. */
static inline size_t block_bytes(int64_t inputs)
{
    return (size_t)segments(inputs) * TILE_SIDE * TILE_BYTES;
}

static inline __mmask32 there(int64_t inputs, int64_t k)
{
    return inputs - k >= 32 ? 0xffffffff : inputs > k ? ((__mmask32)1 << (inputs - k)) - 1 : 0;
}

/* Rows [row, row + 16) of x, or as many as there are: row m of a lane's tile has that lane of row m. */
static void tiles_lay_inputs(const Linear *job, int64_t row, char *to)
{
    int64_t segs = segments(job->inputs);
    for (int64_t m = 0; m < TILE_SIDE; m++)
        for (int64_t seg = 0; seg < segs; seg++) {
            __m512i v[16];
            const uint16_t *x = (const uint16_t *)job->x + (row + m) * job->x_row;
            UNROLLED for (int s = 0; s < 16; s++) {
                int64_t k = seg * SEGMENT + s * 32;
                __mmask32 mask = row + m < job->rows ? there(job->inputs, k) : 0;
                v[s] = _mm512_maskz_loadu_epi16(mask, mask ? x + k : x);
            }
            turn(v);
            UNROLLED for (int lane = 0; lane < 16; lane++)
                _mm512_store_si512(to + (lane * segs + seg) * TILE_BYTES + m * 64, v[lane]);
        }
}

/* Outputs [first, first + wide), of at most 16: row s of a lane's tile has that lane of step s of each output. */
static void tiles_lay_weights(const Linear *job, int64_t first, int64_t wide, char *to)
{
    int64_t segs = segments(job->inputs);
    for (int64_t seg = 0; seg < segs; seg++)
        for (int64_t s = 0; s < 16; s++) {
            __m512i v[16];
            int64_t k = seg * SEGMENT + s * 32;
            UNROLLED for (int n = 0; n < 16; n++) {
                __mmask32 mask = n < wide ? there(job->inputs, k) : 0;
                const void *w = mask ? weights_at(job, first + n, k) : job->w;
                FETCH_FAR((const char *)w + 2 * TILE_SIDE * (job->w_row << (job->form != INT8_HALVES)));
                v[n] = (__m512i)(job->form == INT8_HALVES ? halves_some_c(mask, w) : halves_some_b(mask, w));
            }
            turn(v);
            UNROLLED for (int lane = 0; lane < 16; lane++)
                _mm512_store_si512(to + (lane * segs + seg) * TILE_BYTES + s * 64, v[lane]);
        }
}

/* To tiles 0 to 3 the products of up to 2 by 2 tiles: rows at `a`, of `row_bytes`, and columns at `b`. The second ones lie
 * `a_block` and `b_block` bytes behind the first. */
static inline ALWAYS void tiles_add(const void *a, size_t a_block, int64_t row_bytes, const void *b, size_t b_block,
                                    int rows_too, int columns_too)
{
    TILE_LOAD(4, a, row_bytes);
    TILE_LOAD(6, b, 64);
    TILE_MULTIPLY(0, 4, 6);
    if (columns_too) {
        TILE_LOAD(7, (const char *)b + b_block, 64);
        TILE_MULTIPLY(1, 4, 7);
    }
    if (rows_too) {
        TILE_LOAD(5, (const char *)a + a_block, row_bytes);
        TILE_MULTIPLY(2, 5, 6);
    }
    if (rows_too && columns_too)
        TILE_MULTIPLY(3, 5, 7);
}

/* Sums of each lane of up to 2 by 2 blocks: lane, rows' block, outputs' block, row, output. */
static void tiles_multiply(const char *a, const char *b, int64_t segs, int rows_too, int outputs_too, float *sums)
{
    size_t block = (size_t)segs * TILE_SIDE * TILE_BYTES;
    for (int64_t lane = 0; lane < 16; lane++) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t seg = 0; seg < segs; seg++) {
            size_t at = (size_t)(lane * segs + seg) * TILE_BYTES;
            tiles_add(a + at, block, 64, b + at, block, rows_too, outputs_too);
        }
        float *to = sums + lane * 4 * 256;
        TILE_STORE(0, to);
        TILE_STORE(1, to + 256);
        TILE_STORE(2, to + 512);
        TILE_STORE(3, to + 768);
    }
}

/* Lanes are added as in `total`, for 16 outputs at a time. */
APART void tiles_total(const float *sums, int64_t rows, float *to)
{
    for (int64_t m = 0; m < rows; m++)
        for (int half = 0; half < 2; half++) {
            __m512 v[16];
            UNROLLED for (int lane = 0; lane < 16; lane++)
                v[lane] = _mm512_load_ps(sums + lane * 1024 + m / 16 * 512 + half * 256 + m % 16 * 16);
            UNROLLED for (int i = 0; i < 8; i++)
                v[i] = _mm512_add_ps(v[i], v[i + 8]);
            UNROLLED for (int i = 0; i < 4; i++)
                v[i] = _mm512_add_ps(v[i], v[i + 4]);
            v[0] = _mm512_add_ps(v[0], v[2]);
            v[1] = _mm512_add_ps(v[1], v[3]);
            v[0] = _mm512_add_ps(v[0], v[1]);
            _mm512_store_ps(to + m * 32 + half * 16, v[0]);
        }
}

/* Outputs [begin, end) of all rows, which lie laid out in `packed`. */
static void tiles_linear(const Linear *job, int64_t begin, int64_t end)
{
    int64_t segs = segments(job->inputs);
    size_t block = block_bytes(job->inputs);
    char *room = aligned_alloc(64, 2 * block + (16 * 1024 + 32 * 32) * sizeof(float));
    if (room == NULL) { /* the same bits, more slowly */
        few_linear(job, begin, end);
        return;
    }
    float *lanes = (float *)(room + 2 * block), *sums = lanes + 16 * 1024;
    unsigned before = _mm_getcsr();
    TILES_BEGIN(&tiles_shape);
    for (int64_t first = begin; first < end; first += 32) {
        int64_t wide = end - first < 32 ? end - first : 32;
        tiles_lay_weights(job, first, wide < 16 ? wide : 16, room);
        if (wide > 16)
            tiles_lay_weights(job, first + 16, wide - 16, room + block);
        for (int64_t row = 0; row < job->rows; row += 32) {
            int64_t rows = job->rows - row < 32 ? job->rows - row : 32;
            tiles_multiply(job->packed + row / 16 * block, room, segs, rows > 16, wide > 16, lanes);
            _mm_setcsr(before | FLUSHED);
            tiles_total(lanes, rows, sums);
            _mm_setcsr(before);
            for (int64_t i = 0; i < rows; i++)
                halves_finish(job, sums + i * 32, row + i, first, wide);
        }
    }
    TILES_END();
    free(room);
}
#undef APART

/* Whether the processor has tiles of bfloat16, and the system lets this process use them: that is asked once. */
static int tiles_can(void)
{
#ifdef TILES_EMULATED
    return 1;
#else
    static int known = -1;
    if (known < 0)
        known = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16")
                && syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return known;
#endif
}
