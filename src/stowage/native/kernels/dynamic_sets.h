/* Products of inputs that are rounded to 8 bits by instruction set, all of which give the same bits. Included by
 * kernels.c. */

typedef struct {
    int (*linear)(const Linear *, int64_t, int64_t);
    void (*round)(const void *, int, int64_t, int, DynamicInputs *);
} Dynamic;

static const Dynamic BASE_DYNAMIC = {dynamic_linear, dynamic_round};
#ifdef CHOICE
static const Dynamic AVX2_DYNAMIC = {dynamic_avx2, dynamic_round_avx2};
#endif
#ifdef PAIRS
static const Dynamic VNNI_DYNAMIC = {dynamic_vnni, dynamic_round_quickly};
#endif
#ifdef TILES
static const Dynamic TILES_DYNAMIC = {dynamic_tiles, dynamic_round_quickly};
#endif
static const Dynamic *dynamic = &BASE_DYNAMIC;

/* What goes with the instructions that are `used`. */
static void choose_dynamic(void)
{
    dynamic = &BASE_DYNAMIC;
#ifdef CHOICE
    if (used != &BASE)
        dynamic = &AVX2_DYNAMIC;
#ifdef PAIRS
    if (used->halves != NULL && __builtin_cpu_supports("avx512vnni"))
        dynamic = &VNNI_DYNAMIC;
#endif
#ifdef TILES
    if (used == &AMX_BF16 && dynamic == &VNNI_DYNAMIC && TILES_OF_BYTES)
        dynamic = &TILES_DYNAMIC;
#endif
#endif
}
