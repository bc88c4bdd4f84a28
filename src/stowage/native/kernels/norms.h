/* The Python function for root mean square norms. Included by kernels.c. */

/* Shares of a norm: NORM_ROWS rows. */

enum { NORM_ROWS = 16 };

static void norm_piece(const void *argument, int64_t at)
{
    const Norm *job = argument;
    int64_t begin = at * NORM_ROWS;
    used->norm(job, begin, begin + NORM_ROWS < job->rows ? begin + NORM_ROWS : job->rows);
}

static void spread_norm(const Norm *job, long threads)
{
    spread_pieces(norm_piece, job, (job->rows + NORM_ROWS - 1) / NORM_ROWS, job->rows * job->width < 65536 ? 1 : threads);
}

static PyObject *norm(PyObject *Py_UNUSED(self), PyObject *args)
{
    int threads;
    Norm job;
    if (!PyArg_ParseTuple(args, "O&O&O&nnffiii", read_address, &job.x, read_address, &job.w, read_address, &job.y,
                          &job.rows, &job.width, &job.eps, &job.more, &job.half, &job.way, &threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    spread_norm(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
