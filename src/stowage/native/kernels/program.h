/* Runs several kernels in one call from Python: a program is a list of numbers with their order and all addresses
 * (executor/replay/programs). An address is an index into a list of buffers, which may change between calls, and an
 * offset. Included by kernels.c. */

enum { LINEAR_LAYERS = 1, NORM_ROWS_OF = 2, POINTWISE = 3, PUT_INTO_BLOCKS = 4, ATTEND = 5, LINEAR_OF_STACKS = 6, ROTATE = 7, LOOK_UP_ROWS = 8 };

typedef struct {
    const int64_t *at, *end, *buffers;
    int64_t count;
    int wrong, absent; /* absent: a row that a table does not have */
} Reader;

static int64_t next_number(Reader *r)
{
    if (r->at < r->end)
        return *r->at++;
    r->wrong = 1;
    return 0;
}

static void *next_address(Reader *r)
{
    int64_t buffer = next_number(r), offset = next_number(r);
    if (buffer >= 0 && buffer < r->count)
        return address(r->buffers[buffer] + offset);
    r->wrong = r->wrong || buffer != -1; /* -1: nothing is there */
    return NULL;
}

/* Layers as `linear` takes them, in numbers: how many. */
static int next_layers(Reader *r, int64_t *value, long threads)
{
    int64_t layers = next_number(r);
    r->wrong = r->wrong || layers < 1 || layers > TOGETHER;
    if (r->wrong)
        return 0;
    value[0] = (int64_t)(intptr_t)next_address(r);
    for (int i = 1; i < COMMON - 1; i++)
        value[i] = next_number(r); /* rows, inputs, x_row, group, form, narrow */
    value[COMMON - 1] = threads;
    for (int64_t *each = value + COMMON; each < value + COMMON + EACH * layers; each += EACH) {
        for (int i = 0; i < EACH; i++) /* w, scales, y and zeros are addresses */
            each[i] = i < 3 || i == 6 ? (int64_t)(intptr_t)next_address(r) : next_number(r);
    }
    r->wrong = r->wrong || !can_multiply(value[5], value[6], value[2]);
    return (int)layers;
}

static int run_linear(Reader *r, long threads)
{
    int64_t value[COMMON + EACH * TOGETHER];
    int layers = next_layers(r, value, threads);
    return r->wrong || multiply_together(value, layers);
}

/* The number of what row i takes of `count`; -1: none. `chosen` NULL: that of the row. */
static int64_t number_of(const int64_t *chosen, int64_t i, int64_t count)
{
    int64_t number = chosen == NULL ? i : chosen[i];
    return number < count ? number : -1;
}

/* Each row by its own matrix of one or more stacks; zeros where it has none. */
static int run_linear_of_stacks(Reader *r, long threads)
{
    enum { Y, W, SCALES, ZEROS, PARTS };
    int64_t value[COMMON + EACH * TOGETHER], apart[TOGETHER][PARTS]; /* how many bytes */
    int64_t matrices = next_number(r);
    const int64_t *chosen = next_address(r);
    int layers = next_layers(r, value, threads), count = 0, there = 1;
    for (int i = 0; i < PARTS * layers; i++)
        apart[i / PARTS][i % PARTS] = next_number(r);
    LinearShares shares;
    int64_t rows = r->wrong ? 0 : value[1], x_bytes = value[3] << (value[5] >= HALVES && value[5] != DYNAMIC ? 1 : 2);
    value[1] = 1;
    for (int64_t i = 0; i < rows * layers && there; i++) {
        int64_t row = i / layers, number = number_of(chosen, row, matrices), *own = apart[i % layers];
        Linear job = read_layer(value, value + COMMON + EACH * (i % layers));
        job.y = (char *)job.y + row * own[Y];
        if (number < 0)
            memset(job.y, 0, (size_t)job.outputs * (job.narrow ? 2 : 4));
        else {
            job.x = (const char *)job.x + row * x_bytes;
            job.w = (const char *)job.w + number * own[W];
            job.scales = (const char *)job.scales + number * own[SCALES];
            job.zeros = (const char *)job.zeros + number * own[ZEROS];
            shares.job[count++] = job;
        }
        if (count == JOBS) {
            there = multiply_each(&shares, count, threads);
            count = 0;
        }
    }
    return there && (count == 0 || multiply_each(&shares, count, threads));
}

/* Rows of a matrix in a format as numbers, or (format 0) of a table as they are, `inputs` bytes of each. With
 * `zeros`, a row that is not there is zeros. */
static void run_look_up(Reader *r)
{
    Linear job = {.form = FLOAT32, .group = 32};
    job.y = next_address(r);
    job.w = next_address(r);
    const int64_t *ids = next_address(r);
    int64_t rows = next_number(r);
    job.outputs = next_number(r);
    job.inputs = next_number(r);
    job.w_row = next_number(r);
    job.format = (int)next_number(r);
    job.narrow = (int)next_number(r);
    int zeros = (int)next_number(r);
    if (!r->wrong)
        r->absent = !look_up_rows(&job, ids, rows, zeros);
}

static float next_float(Reader *r)
{
    int64_t number = next_number(r);
    double value;
    memcpy(&value, &number, sizeof value);
    return (float)value;
}

static void run_norm(Reader *r, long threads)
{
    Norm job;
    job.x = next_address(r);
    job.w = next_address(r);
    job.y = next_address(r);
    job.rows = next_number(r);
    job.width = next_number(r);
    job.eps = next_float(r);
    job.more = next_float(r);
    job.half = (int)next_number(r);
    job.way = (int)next_number(r);
    if (!r->wrong)
        spread_norm(&job, threads);
}

static void run_rotations(Reader *r, long threads)
{
    RotationShares shares;
    Rotation common = {.cosines = next_address(r), .sines = next_address(r)};
    shares.tokens = next_number(r);
    common.width = next_number(r);
    common.half = (int)next_number(r);
    for (int i = 0; i < ROTATIONS; i++) {
        Rotation *job = &shares.job[i];
        *job = common;
        job->x = next_address(r);
        job->out = next_address(r);
        job->heads = next_number(r);
        job->token = next_number(r);
        job->head = next_number(r);
    }
    if (!r->wrong)
        spread_rotations(&shares, threads);
}

static void read_operand(Reader *r, Operand *o)
{
    o->at = next_address(r);
    o->half = (int)next_number(r);
    for (int d = 0; d <= INNER; d++)
        o->step[d] = next_number(r);
}

typedef struct {
    Pointwise job;
    int64_t rows, each;
} PointwiseShares;

static void pointwise_piece(const void *argument, int64_t at)
{
    const PointwiseShares *shares = argument;
    int64_t begin = at * shares->each, end = begin + shares->each;
    used->pointwise(&shares->job, begin, end < shares->rows ? end : shares->rows);
}

static void run_pointwise(Reader *r, long threads)
{
    PointwiseShares shares;
    Pointwise *job = &shares.job;
    job->way = (int)next_number(r);
    shares.rows = 1;
    for (int d = 0; d <= INNER; d++) {
        job->size[d] = next_number(r);
        shares.rows *= d < INNER ? job->size[d] : 1;
    }
    read_operand(r, &job->out);
    read_operand(r, &job->a);
    read_operand(r, &job->b);
    if (r->wrong || shares.rows < 1 || job->size[INNER] < 1)
        return;
    int64_t numbers = shares.rows * job->size[INNER];
    shares.each = 1 + 8192 / job->size[INNER];
    spread_pieces(pointwise_piece, &shares, (shares.rows + shares.each - 1) / shares.each, numbers < 32768 ? 1 : threads);
}

/* New keys or values of `tokens`, each into the block of the pool and at the offset in it that it has. */
static void run_put(Reader *r)
{
    char *to = next_address(r);
    int64_t block = next_number(r), offset = next_number(r), head = next_number(r);
    const int64_t *blocks = next_address(r), *offsets = next_address(r);
    const char *from = next_address(r);
    int64_t from_token = next_number(r), from_head = next_number(r);
    int64_t tokens = next_number(r), heads = next_number(r), bytes = next_number(r); /* of a head; strides too */
    for (int64_t t = 0; t < tokens && !r->wrong; t++)
        for (int64_t h = 0; h < heads; h++)
            memcpy(to + blocks[t] * block + offsets[t] * offset + h * head, from + t * from_token + h * from_head,
                   (size_t)bytes);
}

static void next_blocks(Reader *r, Blocks *b)
{
    b->at = next_address(r);
    b->block = next_number(r);
    b->token = next_number(r);
    b->head = next_number(r);
    b->offloaded = next_address(r);
    b->unit = next_number(r);
}

static int run_attention(Reader *r, long threads)
{
    Attention job;
    job.q = next_address(r);
    job.out = next_address(r);
    next_blocks(r, &job.k);
    next_blocks(r, &job.v);
    job.table = next_address(r);
    job.runs = next_address(r);
    job.sinks = next_address(r);
    job.count = next_number(r);
    job.heads = next_number(r);
    job.fold = next_number(r);
    job.width = next_number(r);
    job.value_width = next_number(r);
    job.block_tokens = next_number(r);
    job.window = next_number(r);
    job.kind = next_number(r);
    job.scale = next_float(r);
    job.softcap = next_float(r);
    job.half = job.narrow = (int)next_number(r);
    job.rounded_from = next_number(r);
    return r->wrong || spread_attention(&job, threads);
}

/* 0: there is no memory for it. */
static int run_all(Reader *r, long threads)
{
    while (r->at < r->end && !r->wrong && !r->absent)
        switch (next_number(r)) {
        case LINEAR_LAYERS:
            if (!run_linear(r, threads))
                return 0;
            break;
        case LINEAR_OF_STACKS:
            if (!run_linear_of_stacks(r, threads))
                return 0;
            break;
        case LOOK_UP_ROWS:
            run_look_up(r);
            break;
        case NORM_ROWS_OF:
            run_norm(r, threads);
            break;
        case POINTWISE:
            run_pointwise(r, threads);
            break;
        case ROTATE:
            run_rotations(r, threads);
            break;
        case PUT_INTO_BLOCKS:
            run_put(r);
            break;
        case ATTEND:
            if (!run_attention(r, threads))
                return 0;
            break;
        default:
            r->wrong = 1;
        }
    return 1;
}

static PyObject *run_program(PyObject *self, PyObject *args)
{
    (void)self;
    int threads, there;
    Py_buffer code, buffers;
    if (!PyArg_ParseTuple(args, "y*y*i", &code, &buffers, &threads))
        return NULL;
    Reader reader = {.at = code.buf,
                     .end = (const int64_t *)code.buf + code.len / 8,
                     .buffers = buffers.buf,
                     .count = buffers.len / 8};
    Py_BEGIN_ALLOW_THREADS
    there = run_all(&reader, threads);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&code);
    PyBuffer_Release(&buffers);
    if (!there)
        return PyErr_NoMemory();
    if (reader.wrong) {
        PyErr_SetString(PyExc_ValueError, "this is no program of the kernels");
        return NULL;
    }
    if (reader.absent)
        return no_such_row();
    Py_RETURN_NONE;
}
