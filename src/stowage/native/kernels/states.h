/* The Python functions for recurrent layers: arguments, and the division among threads. Included by kernels.c. */

enum { LITTLE = 65536 }; /* up to so many multiplications a second thread is not worth it */

typedef struct {
    const void *job;
    int64_t parts, pieces, room; /* `parts` of `pieces` each; floats that a thread needs */
    void (*work)(const void *job, int64_t part, int64_t piece, float *room);
    atomic_long next;
    atomic_int failed;
} StateShares;

static void share_states(void *argument)
{
    StateShares *shares = argument;
    float *room = aligned_alloc(64, ((size_t)shares->room * sizeof *room + 127) / 64 * 64);
    if (room == NULL) {
        atomic_store(&shares->failed, 1);
        return;
    }
    for (int64_t at; (at = atomic_fetch_add(&shares->next, 1)) < shares->parts * shares->pieces;)
        shares->work(shares->job, at / shares->pieces, at % shares->pieces, room);
    free(room);
}

static PyObject *spread_states(StateShares *shares, int64_t operations, int threads)
{
    atomic_init(&shares->next, 0);
    atomic_init(&shares->failed, 0);
    Py_BEGIN_ALLOW_THREADS
    spread(share_states, shares, operations < LITTLE ? 1 : threads);
    Py_END_ALLOW_THREADS
    if (atomic_load(&shares->failed) && atomic_load(&shares->next) < shares->parts * shares->pieces)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int read_tuple(PyObject *tuple, int64_t *to, Py_ssize_t count)
{
    if (PyTuple_GET_SIZE(tuple) == count)
        return read_numbers(((PyTupleObject *)tuple)->ob_item, count, to);
    PyErr_Format(PyExc_TypeError, "expected %zd numbers", count);
    return -1;
}

static void delta_part(const void *argument, int64_t part, int64_t piece, float *room)
{
    const Delta *job = argument;
    int64_t begin = piece * DELTA_VALUES, end = begin + DELTA_VALUES;
    used->delta(job, part / job->heads, part % job->heads, begin, end < job->values ? end : job->values, room);
}

static PyObject *delta(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *at, *sizes, *strides;
    int64_t a[8], n[5], s[10];
    int threads;
    Delta job;
    if (!PyArg_ParseTuple(args, "O!O!O!fiiii", &PyTuple_Type, &at, &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &job.scale, &job.per_key, &job.normed, &job.half, &threads)
        || read_tuple(at, a, 8) < 0 || read_tuple(sizes, n, 5) < 0 || read_tuple(strides, s, 10) < 0)
        return NULL;
    job.q = address(a[0]), job.k = address(a[1]), job.v = address(a[2]);
    job.decay = address(a[3]), job.beta = address(a[4]), job.state = address(a[5]), job.out = address(a[6]);
    job.rows = address(a[7]);
    job.batch = n[0], job.tokens = n[1], job.heads = n[2], job.keys = n[3], job.values = n[4];
    job.q_batch = s[0], job.q_token = s[1], job.q_head = s[2], job.k_batch = s[3], job.k_token = s[4];
    job.k_head = s[5], job.v_batch = s[6], job.v_token = s[7], job.v_head = s[8], job.state_batch = s[9];
    StateShares shares = {.job = &job,
                          .parts = job.batch * job.heads,
                          .pieces = (job.values + DELTA_VALUES - 1) / DELTA_VALUES,
                          .room = 4 * job.keys + (2 + job.keys) * DELTA_VALUES,
                          .work = delta_part};
    return spread_states(&shares, job.batch * job.tokens * job.heads * job.keys * job.values, threads);
}

static void scan_part(const void *argument, int64_t part, int64_t Py_UNUSED(piece), float *room)
{
    const Scan *job = argument;
    used->scan(job, part / job->heads, part % job->heads, room);
}

static PyObject *scan(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *at, *sizes, *strides;
    int64_t a[10], n[6], s[13];
    int threads;
    Scan job;
    if (!PyArg_ParseTuple(args, "O!O!O!ffiii", &PyTuple_Type, &at, &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &job.least, &job.most, &job.softplus, &job.half, &threads)
        || read_tuple(at, a, 10) < 0 || read_tuple(sizes, n, 6) < 0 || read_tuple(strides, s, 13) < 0)
        return NULL;
    job.x = address(a[0]), job.b = address(a[1]), job.c = address(a[2]), job.dt = address(a[3]);
    job.bias = address(a[4]), job.a = address(a[5]), job.d = address(a[6]);
    job.state = address(a[7]), job.out = address(a[8]), job.rows = address(a[9]);
    job.batch = n[0], job.tokens = n[1], job.heads = n[2], job.groups = n[3], job.width = n[4], job.states = n[5];
    job.x_batch = s[0], job.x_token = s[1], job.x_head = s[2], job.b_batch = s[3], job.b_token = s[4];
    job.b_group = s[5], job.c_batch = s[6], job.c_token = s[7], job.c_group = s[8], job.dt_batch = s[9];
    job.dt_token = s[10], job.dt_head = s[11], job.state_batch = s[12];
    StateShares shares = {.job = &job,
                          .parts = job.batch * job.heads,
                          .pieces = 1,
                          .room = 2 * SCAN_TOKENS * (job.states + job.width),
                          .work = scan_part};
    return spread_states(&shares, job.batch * job.tokens * job.heads * job.width * job.states, threads);
}

static void convolve_part(const void *argument, int64_t part, int64_t Py_UNUSED(piece), float *room)
{
    const Convolution *job = argument;
    int64_t begin = part * CHANNELS, end = begin + CHANNELS;
    used->convolve(job, begin, end < job->channels ? end : job->channels, room);
}

static PyObject *convolve(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *at, *sizes, *strides;
    int64_t a[6], n[5], s[3];
    int threads;
    Convolution job;
    if (!PyArg_ParseTuple(args, "O!O!O!iii", &PyTuple_Type, &at, &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &job.silu, &job.half, &threads)
        || read_tuple(at, a, 6) < 0 || read_tuple(sizes, n, 5) < 0 || read_tuple(strides, s, 3) < 0)
        return NULL;
    job.x = address(a[0]), job.w = address(a[1]), job.bias = address(a[2]), job.state = address(a[3]);
    job.out = address(a[4]), job.rows = address(a[5]);
    job.batch = n[0], job.tokens = n[1], job.channels = n[2], job.taps = n[3], job.before = n[4];
    job.x_batch = s[0], job.x_token = s[1], job.state_batch = s[2];
    if (job.taps > TAPS || job.before < job.taps - 1 || (job.state != NULL && (job.tokens != 1 || !job.before))) {
        PyErr_SetString(PyExc_ValueError, "convolve takes up to 16 taps; a state of all of them but one, or more, goes "
                                          "with a single token");
        return NULL;
    }
    StateShares shares = {.job = &job,
                          .parts = (job.channels + CHANNELS - 1) / CHANNELS,
                          .pieces = 1,
                          .room = (2 * job.taps + 2) * CHANNELS,
                          .work = convolve_part};
    return spread_states(&shares, 4 * job.batch * job.tokens * job.channels * job.taps, threads);
}
