/* The Python functions for linear layers: arguments, and the division among threads. Included by kernels.c. */

/* Shares of linear layers with the same inputs: ranges of outputs, taken by the next free thread. */

enum { TOGETHER = 8, COMMON = 8, EACH = 9, JOBS = 64 }; /* layers at most; arguments of all, and of each; see count */
enum { TRANSPOSED_BYTES = 640 << 10 }; /* bytes of transposed weights: this share of the L2 cache */

typedef struct {
    Linear job[JOBS];
    int64_t firsts[JOBS + 1]; /* how many shares are before each layer */
    int64_t each;
    int count; /* layers: of the same inputs up to TOGETHER, else up to JOBS */
    atomic_long next;
    atomic_int failed;
} LinearShares;

/* Outputs [begin, end) of weights [inputs, outputs]; `work` multiplies when they are transposed. 0: no memory. */
static int multiply_transposed(const Linear *job, int64_t begin, int64_t end, void (*work)(const Linear *, int64_t, int64_t))
{
    int64_t size = job->form == FLOAT32 ? 4 : 2, most = TRANSPOSED_BYTES / size / laid_stride(job);
    most = most > 192 ? 192 : most > 96 ? 96 : most > 32 ? most / 32 * 32 : 32; /* `halves_linear` takes 96 at once */
    return multiply_laid(job, begin, end, size, most, used->transpose, work);
}

/* Outputs [begin, end) of one layer. Returns 0 if there is no memory. */
static int multiply(const Linear *job, int64_t begin, int64_t end)
{
    if (job->wide != NULL) {
        Linear own = *job;
        own.y = job->wide;
        own.wide = NULL;
        own.narrow = 0;
        int there = multiply(&own, begin, end);
        for (int64_t at = begin; at < job->rows * job->outputs; at += job->outputs)
            base_narrow(job->wide + at, (uint16_t *)job->y + at, end - begin);
        return there;
    }
#ifdef CHOICE
    if (used == &AVX2 && lies_by_inputs(job))
        return avx2_each_turned(job, begin, end, multiply);
#endif
    if (job->form >= DYNAMIC)
        return dynamic->linear(job, begin, end);
    void (*work)(const Linear *, int64_t, int64_t) =
        job->packed ? used->tiles : job->form >= HALVES ? used->halves : used->linear;
    if (job->format == INPUTS_FIRST)
        return multiply_transposed(job, begin, end, work);
#ifdef PAIRS
    if (job->format != PLAIN && job->form >= HALVES)
        return coded_linear(job, begin, end, work);
#endif
    work(job, begin, end);
    return 1;
}

static void share_linear(void *argument)
{
    LinearShares *shares = argument;
    for (int at = 0;;) {
        int64_t share = atomic_fetch_add(&shares->next, 1);
        while (at < shares->count && share >= shares->firsts[at + 1])
            at++;
        if (at == shares->count)
            return;
        const Linear *job = &shares->job[at];
        int64_t begin = (share - shares->firsts[at]) * shares->each;
        int64_t end = begin + shares->each < job->outputs ? begin + shares->each : job->outputs;
        if (!multiply(job, begin, end))
            atomic_store(&shares->failed, 1);
    }
}

static void spread_linear(LinearShares *shares, long threads)
{
    atomic_init(&shares->next, 0);
    spread(share_linear, shares, threads);
}

#ifdef TILES
/* Shares of laying out inputs: 16 rows. */

typedef struct {
    const Linear *job;
    char *to;
} LayShares;

static void lay_piece(const void *argument, int64_t block)
{
    const LayShares *shares = argument;
    tiles_lay_inputs(shares->job, block * TILE_SIDE, shares->to + block * block_bytes(shares->job->inputs));
}

/* Many rows, TILES_ROWS at a time: their inputs are packed first. Returns 0 if there is no memory. */
static int spread_tiles(LinearShares *shares, int layers, long threads)
{
    Linear all[TOGETHER];
    memcpy(all, shares->job, sizeof all);
    int64_t rows = all[0].rows, most = rows < TILES_ROWS ? rows : TILES_ROWS;
    char *room = aligned_alloc(64, (size_t)((most + TILE_SIDE - 1) / TILE_SIDE) * block_bytes(all[0].inputs));
    if (room == NULL)
        return 0;
    for (int64_t row = 0; row < rows; row += most) {
        for (int i = 0; i < layers; i++)
            shares->job[i] = some_rows(&all[i], row, most, room);
        LayShares lay = {.job = shares->job, .to = room};
        spread_pieces(lay_piece, &lay, (shares->job->rows + TILE_SIDE - 1) / TILE_SIDE, threads);
        spread_linear(shares, threads);
    }
    free(room);
    return 1;
}
#endif

/* Shares of rounding inputs: some rows. */

typedef struct {
    const Linear *job;
    DynamicInputs *to;
    int bias;
} RoundShares;

static void round_piece(const void *argument, int64_t row)
{
    const RoundShares *shares = argument;
    const Linear *job = shares->job;
    int half = job->form == DYNAMIC_HALVES;
    dynamic->round((const char *)job->x + (row * job->x_row << (half ? 1 : 2)), half, job->inputs, shares->bias,
                   shares->to + row * dynamic_groups(job->inputs));
}

/* Where the shares of each of `layers` begin. */
static void count_shares(LinearShares *shares, int layers)
{
    shares->firsts[0] = 0;
    shares->count = layers;
    for (int i = 0; i < layers; i++)
        shares->firsts[i + 1] = shares->firsts[i] + (shares->job[i].outputs + shares->each - 1) / shares->each;
}

/* How many of `all` from `first` on can have the inputs that are rounded with this `bias`, which says nothing to those of
 * a least value. */
static int rounded_alike(const Linear *all, int first, int layers, int *bias)
{
    *bias = 0;
    int i = first;
    for (; i < layers; i++) {
        int own = dynamic_bias(&all[i]);
        if (*bias != 0 && own != 0 && own != *bias)
            break;
        *bias = own != 0 ? own : *bias;
    }
    return i - first;
}

/* Layers of inputs in bfloat16, which no instructions multiply: as floats. What these are in; NULL: there is no memory for it.
 * `common`: all have the same inputs. */
static float *widen_layers(LinearShares *shares, int layers, int common)
{
    int64_t rows = shares->job->rows, inputs = shares->job->inputs, floats = 0;
    for (int i = 0; i < layers; i++)
        floats += rows * ((shares->job[i].narrow ? shares->job[i].outputs : 0) + (i == 0 || !common ? inputs : 0));
    float *room = malloc((size_t)floats * sizeof *room), *next = room;
    for (int i = 0; room != NULL && i < layers; i++) {
        Linear *job = &shares->job[i];
        const uint16_t *from = job->x;
        job->x = i > 0 && common ? room : next;
        for (int64_t r = 0; (i == 0 || !common) && r < rows; r++, next += inputs)
            base_widen(from + r * job->x_row, next, inputs);
        job->x_row = inputs;
        job->form = job->form == HALVES ? BFLOAT16 : INT8;
        if (job->narrow) {
            job->wide = next;
            next += rows * job->outputs;
        }
    }
    return room;
}

/* Such layers, some rows at a time. 0: there is no memory for it. */
static int spread_wide(LinearShares *shares, int layers, long threads)
{
    Linear all[TOGETHER];
    memcpy(all, shares->job, sizeof all);
    for (int64_t row = 0; row < all[0].rows; row += DYNAMIC_ROWS) {
        for (int i = 0; i < layers; i++)
            shares->job[i] = some_rows(&all[i], row, DYNAMIC_ROWS, NULL);
        float *room = widen_layers(shares, layers, 1);
        if (room == NULL)
            return 0;
        spread_linear(shares, threads);
        free(room);
    }
    return 1;
}

/* Whether inputs become floats first. */
static int is_wide(const Linear *job)
{
    return job->form >= HALVES && job->form < DYNAMIC && used->halves == NULL;
}

/* Layers whose inputs are rounded, some rows at a time. 0: there is no memory for it. */
static int spread_dynamic(LinearShares *shares, int layers, long threads)
{
    Linear all[TOGETHER];
    memcpy(all, shares->job, sizeof all);
    int64_t rows = all[0].rows, most = rows < DYNAMIC_ROWS ? rows : DYNAMIC_ROWS;
    size_t row_bytes = (size_t)dynamic_groups(all[0].inputs) * sizeof(DynamicInputs);
    DynamicInputs *room = aligned_alloc(64, (size_t)(most + 3) * row_bytes); /* five rows are multiplied as eight */
    if (room == NULL)
        return 0;
    for (int64_t row = 0; row < rows; row += most)
        for (int i = 0, alike; i < layers; i += alike) {
            RoundShares round = {.job = shares->job, .to = room};
            alike = rounded_alike(all, i, layers, &round.bias);
            for (int j = 0; j < alike; j++)
                shares->job[j] = some_rows(&all[i + j], row, most, room);
            spread_pieces(round_piece, &round, round.job->rows, round.job->rows * round.job->inputs < 65536 ? 1 : threads);
            count_shares(shares, alike);
            spread_linear(shares, threads);
        }
    free(room);
    return 1;
}

/* A layer of what all have in common and of what is its own. */
static Linear read_layer(const int64_t *value, const int64_t *own)
{
    Linear job = {.x = address(value[0]),
                  .rows = value[1],
                  .inputs = value[2],
                  .x_row = value[3],
                  .group = value[4],
                  .form = (int)value[5],
                  .narrow = (int)value[6],
                  .w = address(own[0]),
                  .scales = address(own[1]),
                  .y = address(own[2]),
                  .outputs = own[3],
                  .w_row = own[4],
                  .format = (int)own[5],
                  .zeros = address(own[6]),
                  .tall = own[7],
                  .kind = (int)own[8]};
    if (job.form >= DYNAMIC && job.format == PLAIN)
        job.group = job.inputs; /* a scale for each output */
    return job;
}

/* Whether many rows are laid out for tiles. */
static int is_tiled(const Linear *job)
{
    return job->form >= HALVES && job->form < DYNAMIC && used->tiles != NULL && job->rows > TILES_FEW;
}

/* The outputs of a share, of `layers` alike; sets how many threads are worth it. */
static long divide(LinearShares *shares, int layers, long threads)
{
    const Linear *job = shares->job;
    int64_t outputs = 0;
    for (int i = 0; i < layers; i++)
        outputs += job[i].outputs;
    threads = job->rows * job->inputs * outputs < 65536 ? 1 : threads;
    int rounds = job->form >= DYNAMIC, step = is_tiled(job) || rounds || job->format != PLAIN ? 32 : 12;
    int across = lies_by_inputs(job), runs = across ? 2 : 4;
    if (across && !rounds && outputs < 2048 * threads) /* a run is as long as a piece is wide */
        runs = 1;
    int64_t pieces = (job->rows > FEW ? 8 : runs) * threads; /* few rows wait for memory, which prefers long runs */
    shares->each = threads > 1 ? ((outputs - 1) / pieces / step + 1) * step : outputs;
    count_shares(shares, layers);
    return threads;
}

/* Up to TOGETHER layers with the same inputs, which are as `linear` takes them; 0: there is no memory for it. */
static int multiply_together(const int64_t *value, int layers)
{
    LinearShares shares;
    atomic_init(&shares.failed, 0);
    for (int i = 0; i < layers; i++)
        shares.job[i] = read_layer(value, value + COMMON + EACH * i);
    long threads = divide(&shares, layers, (long)value[7]);
    if (shares.job->form >= DYNAMIC)
        return spread_dynamic(&shares, layers, threads) && !atomic_load(&shares.failed);
    if (is_wide(shares.job))
        return spread_wide(&shares, layers, threads) && !atomic_load(&shares.failed);
#ifdef TILES
    if (is_tiled(shares.job) && spread_tiles(&shares, layers, threads))
        return !atomic_load(&shares.failed);
#endif
    spread_linear(&shares, threads);
    return !atomic_load(&shares.failed);
}

/* Layers of a row of inputs each; 0: there is no memory for it. */
static int multiply_each(LinearShares *shares, int layers, long threads)
{
    int64_t groups = dynamic_groups(shares->job->inputs);
    DynamicInputs *room = NULL;
    float *wide = NULL;
    atomic_init(&shares->failed, 0);
    if (is_wide(shares->job) && (wide = widen_layers(shares, layers, 0)) == NULL)
        return 0;
    if (shares->job->form >= DYNAMIC && (room = aligned_alloc(64, (size_t)(layers * groups) * sizeof *room)) == NULL)
        return 0;
    for (int i = 0; room != NULL && i < layers; i++) {
        Linear *job = &shares->job[i];
        dynamic->round(job->x, job->form == DYNAMIC_HALVES, job->inputs, dynamic_bias(job), room + i * groups);
        job->packed = (const char *)(room + i * groups);
    }
    spread_linear(shares, divide(shares, layers, threads));
    free(room);
    free(wide);
    return !atomic_load(&shares->failed);
}

/* Whether a product of this form can be made, with sums that are `narrow`. */
static int can_multiply(int64_t form, int64_t narrow, int64_t inputs)
{
    if (form >= DYNAMIC)
        return form <= DYNAMIC_HALVES && inputs % DYNAMIC_BLOCK == 0;
    return form >= HALVES || narrow == 0;
}

static PyObject *linear(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    int64_t value[COMMON + EACH * TOGETHER];
    if (count <= COMMON || (count - COMMON) % EACH != 0 || count > COMMON + EACH * TOGETHER) {
        PyErr_SetString(PyExc_TypeError, "linear takes x, rows, inputs, x_row, group, form, narrow, threads, and of up "
                                         "to 8 layers w, scales, y, outputs, w_row, format, zeros, tall, kind");
        return NULL;
    }
    if (read_numbers(args, count, value) < 0)
        return NULL;
    if (!can_multiply(value[5], value[6], value[2])) {
        PyErr_SetString(PyExc_ValueError, "only products of bfloat16 are narrow, and only of blocks of 32 inputs are they rounded");
        return NULL;
    }
    int there;
    Py_BEGIN_ALLOW_THREADS
    there = multiply_together(value, (int)((count - COMMON) / EACH));
    Py_END_ALLOW_THREADS
    if (!there)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Inputs that are decoded at a time: a multiple of every block. */
enum { LOOKED_UP = 1024 };

/* `count` rows of a matrix in a format, or (0) of plain bytes, of outputs `ids`, to job->y. Of an output
 * that is not there `zeros` if so said, of plain bytes alone; otherwise returns 0. */
static int look_up_rows(const Linear *job, const int64_t *ids, int64_t count, int zeros)
{
    float values[LOOKED_UP + 256];
    for (int64_t i = 0; i < count; i++) {
        int there = ids[i] >= 0 && ids[i] < job->outputs;
        if (!there && (job->format || !zeros))
            return 0;
        if (!job->format) {
            char *to = (char *)job->y + i * job->inputs;
            there ? memcpy(to, (const char *)job->w + ids[i] * job->w_row, (size_t)job->inputs) : memset(to, 0, (size_t)job->inputs);
            continue;
        }
        for (int64_t k = 0, end; k < job->inputs; k = end) {
            end = k + LOOKED_UP < job->inputs ? k + LOOKED_UP : job->inputs;
            base_decode(job, ids[i], k, end, values);
            if (job->narrow)
                base_narrow(values, (uint16_t *)job->y + i * job->inputs + k, end - k);
            else
                memcpy((float *)job->y + i * job->inputs + k, values, (size_t)(end - k) * 4);
        }
    }
    return 1;
}

static PyObject *no_such_row(void)
{
    PyErr_SetString(PyExc_IndexError, "a row is asked for that the matrix does not have");
    return NULL;
}

static PyObject *look_up(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    int64_t value[9];
    if (count != 9) {
        PyErr_SetString(PyExc_TypeError, "look_up takes ids, their number, w, y, outputs, inputs, w_row, format, narrow");
        return NULL;
    }
    if (read_numbers(args, count, value) < 0)
        return NULL;
    Linear job = {.w = address(value[2]), .y = address(value[3]), .outputs = value[4], .inputs = value[5],
                  .w_row = value[6], .format = (int)value[7], .narrow = (int)value[8], .form = FLOAT32, .group = 32};
    int there;
    Py_BEGIN_ALLOW_THREADS
    there = look_up_rows(&job, address(value[0]), value[1], 0);
    Py_END_ALLOW_THREADS
    if (!there)
        return no_such_row();
    Py_RETURN_NONE;
}
