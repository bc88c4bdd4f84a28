/* Products of inputs that were rounded to 8 bits (dynamic.h), of many rows by whole tiles (AMX): the bits of
 * dynamic_vnni.h, since products of bytes are summed as whole numbers.
 *
 * One TDPBSUD sums those of a block, for 16 rows by 16 outputs; of TWO those of half a block. Outputs lie as a panel has
 * them, which is what the instruction takes. 16 rows are laid out so that a block's codes are side by side.
 */
enum { LAID_GROUP = TILE_SIDE * DYNAMIC_GROUP }; /* bytes of 16 rows of a group */

#ifdef TILES_EMULATED
#define TILES_OF_BYTES 1
#define TILE_MULTIPLY_BYTES(sums, a, b) tiles_emulate_bytes(sums, a, b)
#else
#define TILES_OF_BYTES __builtin_cpu_supports("amx-int8")
#define TILE_MULTIPLY_BYTES(sums, a, b) _tile_dpbsud(sums, a, b)
#endif

/* Up to 16 rows of a group: 32 codes of a block after each other, two blocks in 64 bytes of a row, rows 64 bytes apart.
 * Rows that are not there are zeros. */
static inline ALWAYS void dynamic_lay_rows(const DynamicInputs *x, int64_t x_row, int64_t rows, char *to)
{
    __m512i early = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), late = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t m = 0; m < TILE_SIDE; m++, to += 64) {
        __m512i first = _mm512_setzero_si512(), second = first;
        if (m < rows) {
            first = _mm512_loadu_si512(x[m * x_row].codes[0]);
            second = _mm512_loadu_si512(x[m * x_row].codes[1]);
        }
        _mm512_store_si512(to, _mm512_permutex2var_epi64(first, early, second));
        _mm512_store_si512(to + LAID_GROUP / 2, _mm512_permutex2var_epi64(first, late, second));
    }
}

/* Sums of 16 rows, whose codes are `laid`, and 32 outputs: of a block, or of half of one. */
static inline ALWAYS void dynamic_multiply(const char *laid, const uint8_t *w, int32_t (*to)[TILE_SIDE][16])
{
    __asm__ volatile("" : : : "memory"); /* what is loaded is written before: a compiler does not see that it is read */
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_LOAD(4, laid, 64);
    TILE_LOAD(6, w, 128);
    TILE_LOAD(7, w + 64, 128);
    TILE_MULTIPLY_BYTES(0, 4, 6);
    TILE_MULTIPLY_BYTES(1, 4, 7);
    TILE_STORE(0, to[0]);
    TILE_STORE(1, to[1]);
}

/* As `dynamic_tile`, of up to 16 rows. */
static inline ALWAYS void dynamic_by_tiles(DynamicKind kind, const DynamicInputs *from, int64_t rows, const char *laid,
                                           const DynamicPanel *panel, float (*to)[DYNAMIC_WIDE])
{
    int64_t x_row = panel->groups;
    int32_t whole[2][2][TILE_SIDE][16] __attribute__((aligned(64)));
    float sums[TILE_SIDE][DYNAMIC_WIDE] __attribute__((aligned(64)));
    for (int s = 0; s < 4 && s < panel->blocks; s++) {
        int64_t groups = (panel->blocks - s + 3) / 4;
        memset(sums, 0, sizeof sums);
        for (int64_t g = 0; g < groups; g++) {
            int64_t b = s * panel->groups + g;
            const char *at = laid + g * LAID_GROUP + s / 2 * (LAID_GROUP / 2) + s % 2 * DYNAMIC_BLOCK;
            const float *own = panel->scales + b * DYNAMIC_WIDE, *more = panel->more + b * DYNAMIC_WIDE;
            dynamic_multiply(at, panel->codes + b * DYNAMIC_CODES, whole[0]);
            if (kind == TWO)
                dynamic_multiply(at + DYNAMIC_BLOCK / 2, panel->codes + b * DYNAMIC_CODES + DYNAMIC_CODES / 2, whole[1]);
            for (int64_t m = 0; m < rows; m++) {
                const DynamicInputs *in = from + m * x_row + g;
                __m512 scale = _mm512_set1_ps(in->scale[s]);
                UNROLLED for (int c = 0; c < 2; c++) {
                    __m512i all = _mm512_load_si512(whole[kind == TWO][c][m]);
                    __m512 of_weights = _mm512_loadu_ps((kind == TWO ? more : own) + 16 * c), other;
                    if (kind != LEAST)
                        all = _mm512_add_epi32(
                            all, _mm512_set1_epi32(kind == TWO ? in->less[s] - in->first_less[s] : in->less[s]));
                    __m512 value = dynamic_value(all, scale, of_weights);
                    DYNAMIC_SETTLE(value);
                    if (kind == LEAST)
                        other = _mm512_mul_ps(_mm512_set1_ps(in->sum[s]), _mm512_loadu_ps(more + 16 * c));
                    if (kind == TWO)
                        other = dynamic_value(_mm512_add_epi32(_mm512_load_si512(whole[0][c][m]),
                                                               _mm512_set1_epi32(in->first_less[s])),
                                              scale, _mm512_loadu_ps(own + 16 * c));
                    if (kind != BIASED) {
                        DYNAMIC_SETTLE(other);
                        value = _mm512_add_ps(value, other);
                    }
                    _mm512_store_ps(sums[m] + 16 * c, _mm512_add_ps(_mm512_load_ps(sums[m] + 16 * c), value));
                }
            }
        }
        for (int64_t m = 0; m < rows; m++)
            UNROLLED for (int c = 0; c < DYNAMIC_WIDE; c += 16) {
                __m512 column = _mm512_load_ps(sums[m] + c);
                _mm512_store_ps(to[m] + c, s == 0 ? column : _mm512_add_ps(_mm512_load_ps(to[m] + c), column));
            }
    }
}

/* All rows of `job` by the outputs of a panel. 0: there is no memory for it. */
static int dynamic_rows_by_tiles(const Linear *job, const DynamicPanel *panel, int64_t n, int64_t wide)
{
    DynamicKind kind = dynamic_kind(job);
    char *laid = aligned_alloc(64, (size_t)(panel->groups * LAID_GROUP));
    if (laid == NULL)
        return 0;
    tiles_begin_rows((kind == TWO ? DYNAMIC_BLOCK / 2 : DYNAMIC_BLOCK) / 4);
    for (int64_t r = 0; r < job->rows; r += TILE_SIDE) {
        float sums[TILE_SIDE][DYNAMIC_WIDE] __attribute__((aligned(64)));
        int64_t rows = job->rows - r < TILE_SIDE ? job->rows - r : TILE_SIDE;
        const DynamicInputs *x = (const DynamicInputs *)job->packed + r * panel->groups;
        for (int64_t g = 0; g < panel->groups; g++)
            dynamic_lay_rows(x + g, panel->groups, rows, laid + g * LAID_GROUP);
        if (kind == BIASED)
            dynamic_by_tiles(BIASED, x, rows, laid, panel, sums);
        else if (kind == LEAST)
            dynamic_by_tiles(LEAST, x, rows, laid, panel, sums);
        else
            dynamic_by_tiles(TWO, x, rows, laid, panel, sums);
        for (int64_t i = 0; i < rows; i++)
            halves_finish(job, sums[i], r + i, n, wide);
    }
    TILES_END();
    free(laid);
    return 1;
}

/* As `dynamic_vnni`, with tiles where they are quicker. */
static int dynamic_tiles(const Linear *job, int64_t begin, int64_t end)
{
    return dynamic_by(job, begin, end, dynamic_rows_by_tiles);
}
