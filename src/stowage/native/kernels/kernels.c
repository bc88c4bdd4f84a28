/* The kernels' Python functions. Several threads compute, without the interpreter's lock. See kernel.h. */

#include "dynamic.h"
#include "dynamic_linear.h"
#include "formats_common.h"
#include "kernel.h"
#include "super_blocks.h"
#include "team.h"

#define LANES 4
#define NAME(x) base_##x
#include "each_set.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CHOICE 1
#if __GNUC__ >= 11
#define CAN_F16C __builtin_cpu_supports("f16c")
#else
#define CAN_F16C 1 /* every processor with AVX2 has it */
#endif
#include <immintrin.h>
#include <pthread.h>
#include "kept.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define NAME(x) avx2_##x
#include "each_set.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,fma")
#define LANES 16
#define NAME(x) avx512_##x
#include "each_set.h"
#pragma GCC pop_options
#if __GNUC__ >= 10
#define PAIRS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma")
#include "halves.h"
#include "pair_scores.h"
#include "coded_kept.h"
#include "coded.h"
#include "coded_scales.h"
#include "coded_by_inputs.h"
#include "coded_linear.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,fma")
#include "dynamic_codes.h"
#include "dynamic_scales.h"
#include "dynamic_vnni.h"
#include "dynamic_by_inputs.h"
#include "dynamic_vnni_linear.h"
#pragma GCC pop_options
#endif
#if __GNUC__ >= 11 && defined(__linux__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma,amx-tile,amx-bf16")
#include "tiles.h"
#include "tile_scores.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,fma,amx-tile,amx-int8")
#include "dynamic_tiles.h"
#pragma GCC pop_options
#endif
#endif

typedef struct {
    const char *name;
    void (*linear)(const Linear *, int64_t, int64_t);
    void (*halves)(const Linear *, int64_t, int64_t); /* NULL: there are no instructions for it */
    void (*tiles)(const Linear *, int64_t, int64_t);  /* the same of many rows, which lie laid out */
    void (*transpose)(const Linear *, int64_t, int64_t, char *, int64_t);
    const Scoring *scoring;                           /* NULL: floats do it */
    void (*rows)(const Attention *, const Run *, int64_t, int64_t, int64_t, Scratch *);
    void (*norm)(const Norm *, int64_t, int64_t);
    void (*pointwise)(const Pointwise *, int64_t, int64_t);
    void (*rotate)(const Rotation *, int64_t, int64_t);
    void (*delta)(const Delta *, int64_t, int64_t, int64_t, int64_t, float *);
    void (*scan)(const Scan *, int64_t, int64_t, float *);
    void (*convolve)(const Convolution *, int64_t, int64_t, float *);
} Instructions;

#define ALL_BUT_LINEAR(set) \
    set##_rows, set##_norm, set##_pointwise, set##_rotate, set##_delta, set##_scan, set##_convolve

static const Instructions BASE = {"base", base_linear, NULL, NULL, base_transpose, NULL, ALL_BUT_LINEAR(base)};
#ifdef CHOICE
static const Instructions AVX2 = {"avx2", avx2_linear, NULL, NULL, avx2_transpose, NULL, ALL_BUT_LINEAR(avx2)};
static const Instructions AVX512 = {"avx512", avx512_linear, NULL, NULL, avx512_transpose, NULL, ALL_BUT_LINEAR(avx512)};
#ifdef PAIRS
static const Instructions AVX512_BF16 = {"avx512_bf16", avx512_linear, halves_linear, NULL, avx512_transpose, &by_pairs, ALL_BUT_LINEAR(avx512)};
#endif
#ifdef TILES
static const Instructions AMX_BF16 = {"amx_bf16", avx512_linear, few_linear, tiles_linear, avx512_transpose, &by_tiles, ALL_BUT_LINEAR(avx512)};
static int tiles_trusted; /* chosen without being named */
#endif
#endif
static const Instructions *used = &BASE;
static const Scoring *scoring, *scoring_trusted; /* what is used; also where instructions are not named */
static Parallel parallel = NULL;

#include "dynamic_sets.h"

static int choose(const char *name)
{
    const Instructions *found = NULL;
#ifdef CHOICE
    __builtin_cpu_init();
    int can_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && CAN_F16C;
    int can_avx512 = can_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
#ifdef PAIRS
    int can_pairs = can_avx512 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
#ifdef TILES
    if (can_pairs && (name == NULL ? tiles_trusted : strcmp(name, "amx_bf16") == 0) && tiles_can())
        found = &AMX_BF16;
    else
#endif
    if (can_pairs && (name == NULL || strcmp(name, "avx512_bf16") == 0))
        found = &AVX512_BF16;
    else
#endif
    if (can_avx512 && (name == NULL || strcmp(name, "avx512") == 0))
        found = &AVX512;
    else if (can_avx2 && (name == NULL || strcmp(name, "avx2") == 0))
        found = &AVX2;
#endif
    if (found == NULL && (name == NULL || strcmp(name, "base") == 0))
        found = &BASE;
    if (found == NULL)
        return -1;
    used = found;
    choose_dynamic();
    scoring = name != NULL || found->scoring == scoring_trusted ? found->scoring : NULL;
    return 0;
}

static void spread(Share share, void *job, long threads)
{
#ifdef TEAM
    if (threads > 1 && work_together(share, job, threads))
        return;
#endif
    if (parallel != NULL && threads > 1)
        parallel(share, job, (unsigned)threads, 0);
    else
        share(job);
}

/* Shares that are alike, of so many: `work` does number `at` of them. */

typedef struct {
    void (*work)(const void *job, int64_t at);
    const void *job;
    int64_t count;
    atomic_long next;
} Pieces;

static void share_pieces(void *argument)
{
    Pieces *pieces = argument;
    for (int64_t at; (at = atomic_fetch_add(&pieces->next, 1)) < pieces->count;)
        pieces->work(pieces->job, at);
}

static void spread_pieces(void (*work)(const void *, int64_t), const void *job, int64_t count, long threads)
{
    Pieces pieces = {.work = work, .job = job, .count = count};
    atomic_init(&pieces.next, 0);
    spread(share_pieces, &pieces, threads);
}

#include "layers.h"

/* Shares of attention: at most ROWS rows of one run and one head of keys. */

typedef struct {
    const Attention *job;
    const int64_t *firsts; /* how many shares are before each run */
    int64_t shares;
    atomic_long next;
    atomic_int failed;
} AttentionShares;

static void share_attention(void *argument)
{
    AttentionShares *shares = argument;
    const Attention *job = shares->job;
    const Scoring *scored = job->half ? scoring : NULL;
    int64_t widths = job->width + job->value_width, pairs = job->width / 2 + 16;
    int64_t floats = ROWS * (widths + 2) + KEYS * (MANY + job->width + (job->half ? widths : 0))
                     + (scored ? (ROWS + KEYS) * pairs + ROWS * KEYS + SCORE_LANES : 0);
    float *room = aligned_alloc(64, ((size_t)floats * 4 + 127) / 64 * 64);
    if (room == NULL) {
        atomic_store(&shares->failed, 1);
        return;
    }
    Scratch s = {.scoring = scored};
    s.turned = room;
    s.q = s.turned + KEYS * job->width;
    s.out = s.q + ROWS * job->width;
    s.peak = s.out + ROWS * job->value_width;
    s.sum = s.peak + ROWS;
    for (int r = 0; r < MANY; r++)
        s.weights[r] = s.sum + ROWS + r * KEYS;
    s.keys = s.sum + ROWS + MANY * KEYS;
    s.values = s.keys + KEYS * job->width;
    if (scored) {
        s.scores = s.values + KEYS * job->value_width;
        s.lanes = s.scores + ROWS * KEYS;
        s.query_pairs = (uint32_t *)(s.lanes + SCORE_LANES);
        s.key_pairs = s.query_pairs + ROWS * pairs;
        s.value_pairs = (uint32_t *)s.values;
        if (scored->begin != NULL)
            scored->begin(job->width);
    }
    int64_t run = 0;
    for (;;) {
        int64_t at = atomic_fetch_add(&shares->next, 1);
        if (at >= shares->shares)
            break;
        while (shares->firsts[run + 1] <= at)
            run++;
        int64_t rows = job->runs[run].count * job->fold, parts = (rows + ROWS - 1) / ROWS;
        int64_t head = (at - shares->firsts[run]) / parts, begin = (at - shares->firsts[run]) % parts * ROWS;
        used->rows(job, &job->runs[run], head, begin, begin + ROWS < rows ? begin + ROWS : rows, &s);
    }
    if (scored != NULL && scored->end != NULL)
        scored->end();
    free(room);
}

/* 0: there is no memory for it. */
static int spread_attention(const Attention *job, long threads)
{
    int64_t *firsts = malloc((size_t)(job->count + 1) * sizeof *firsts);
    if (firsts == NULL)
        return 0;
    firsts[0] = 0;
    for (int64_t i = 0; i < job->count; i++)
        firsts[i + 1] = firsts[i] + job->heads * ((job->runs[i].count * job->fold + ROWS - 1) / ROWS);
    AttentionShares shares = {.job = job, .firsts = firsts, .shares = firsts[job->count]};
    atomic_init(&shares.next, 0);
    atomic_init(&shares.failed, 0);
    spread(share_attention, &shares, threads);
    free(firsts);
    return !atomic_load(&shares.failed) || atomic_load(&shares.next) >= shares.shares;
}

static int read_blocks(PyObject *tuple, void *to)
{
    Blocks *b = to;
    return PyArg_ParseTuple(tuple, "O&nnnO&n", read_address, &b->at, &b->block, &b->token, &b->head, read_address,
                            &b->offloaded, &b->unit);
}

static PyObject *attention(PyObject *self, PyObject *args)
{
    (void)self;
    int threads;
    Attention job;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&O&nnnnnnnnffiini", read_address, &job.q, read_address, &job.out, read_blocks,
                          &job.k, read_blocks, &job.v, read_address, &job.table, read_address, &job.runs, read_address,
                          &job.sinks, &job.count, &job.heads, &job.fold, &job.width, &job.value_width,
                          &job.block_tokens, &job.window, &job.kind, &job.scale, &job.softcap, &job.half,
                          &job.narrow, &job.rounded_from, &threads))
        return NULL;
    int there;
    Py_BEGIN_ALLOW_THREADS
    there = spread_attention(&job, threads);
    Py_END_ALLOW_THREADS
    if (!there)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#include "norms.h"
#include "rotations.h"
#include "program.h"
#include "states.h"

static PyObject *use_threads(PyObject *self, PyObject *address)
{
    (void)self;
    void *found = PyLong_AsVoidPtr(address);
    if (found == NULL && PyErr_Occurred())
        return NULL;
    parallel = (Parallel)(intptr_t)found;
    Py_RETURN_NONE;
}

static PyObject *use_instructions(PyObject *self, PyObject *name)
{
    (void)self;
    const char *wanted = name == Py_None ? NULL : PyUnicode_AsUTF8(name);
    if (wanted == NULL && PyErr_Occurred())
        return NULL;
    if (choose(wanted) < 0) {
        PyErr_SetString(PyExc_ValueError, "this processor does not have these instructions");
        return NULL;
    }
    return PyUnicode_FromString(used->name);
}

static PyObject *use_grids(PyObject *self, PyObject *table)
{
    (void)self;
    if (!PyBytes_Check(table) || PyBytes_GET_SIZE(table) != sizeof grids) {
        PyErr_Format(PyExc_ValueError, "grids are %zd bytes", sizeof grids);
        return NULL;
    }
    memcpy(&grids, PyBytes_AS_STRING(table), sizeof grids);
    Py_RETURN_NONE;
}

static PyObject *multiplies_halves(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    return PyBool_FromLong(used->halves != NULL);
}

static PyObject *trust_scoring(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    scoring_trusted = scoring;
    Py_RETURN_NONE;
}

static PyObject *trust_tiles(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
#ifdef TILES
    tiles_trusted = 1;
#endif
    choose(NULL);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"linear", FAST(linear), METH_FASTCALL, "y = x w^T of one or more w; addresses and sizes."},
    {"look_up", FAST(look_up), METH_FASTCALL, "Rows of a matrix in a format as numbers; addresses and sizes."},
    {"attention", attention, METH_VARARGS, "Attention over blocks; addresses, strides and sizes."},
    {"norm", norm, METH_VARARGS, "Root mean square norm; addresses and sizes."},
    {"rotate", FAST(rotate), METH_FASTCALL, "Rotary embeddings of queries and keys; addresses, sizes and strides."},
    {"run_program", run_program, METH_VARARGS, "Several of these; their numbers, the buffers' addresses, threads."},
    {"delta", delta, METH_VARARGS, "Gated delta rules; addresses, sizes and strides."},
    {"scan", scan, METH_VARARGS, "Selective state spaces; addresses, sizes and strides."},
    {"convolve", convolve, METH_VARARGS, "Short convolutions over tokens; addresses, sizes and strides."},
    {"multiplies_halves", multiplies_halves, METH_NOARGS, "Whether there are instructions for pairs of bfloat16."},
    {"trust_tiles", trust_tiles, METH_NOARGS, "They were tried: `use_instructions(None)` takes them."},
    {"trust_scoring", trust_scoring, METH_NOARGS, "What attention multiplies bfloat16 with now was tried: it stays."},
    {"use_threads", use_threads, METH_O, "The address of GOMP_parallel; 0: one thread."},
    {"use_grids", use_grids, METH_O, "What i-quants look up; see weights/quantized/i_quants.py."},
    {"use_instructions", use_instructions, METH_O, "None: the best there are. Returns their name."},
    {NULL, NULL, 0, NULL},
};

int add_kernels(PyObject *module)
{
    choose(NULL);
#ifdef TEAM
    pthread_atfork(NULL, NULL, alone_after_fork);
#endif
    return PyModule_AddFunctions(module, methods);
}
