/* The Python function for rotary embeddings: queries and keys of the same tokens in one call. Included by kernels.c. */

/* Shares of a rotation: some tokens of all tensors. */
enum { ROTATED_TOKENS = 16, ROTATIONS = 2 };

typedef struct {
    Rotation job[ROTATIONS];
    int64_t tokens;
} RotationShares;

static void rotation_piece(const void *argument, int64_t at)
{
    const RotationShares *shares = argument;
    int64_t begin = at * ROTATED_TOKENS, end = begin + ROTATED_TOKENS < shares->tokens ? begin + ROTATED_TOKENS : shares->tokens;
    for (int i = 0; i < ROTATIONS; i++)
        used->rotate(&shares->job[i], begin, end);
}

static void spread_rotations(const RotationShares *shares, long threads)
{
    spread_pieces(rotation_piece, shares, (shares->tokens + ROTATED_TOKENS - 1) / ROTATED_TOKENS, threads);
}

static PyObject *rotate(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t count)
{
    enum { COMMON_OF_ROTATIONS = 6, EACH_ROTATION = 5 };
    int64_t value[COMMON_OF_ROTATIONS + ROTATIONS * EACH_ROTATION];
    if (!takes("rotate", count, COMMON_OF_ROTATIONS + ROTATIONS * EACH_ROTATION) || read_numbers(args, count, value) < 0)
        return NULL;
    RotationShares shares = {.tokens = value[2]};
    for (int i = 0; i < ROTATIONS; i++) {
        const int64_t *own = value + COMMON_OF_ROTATIONS + EACH_ROTATION * i;
        shares.job[i] = (Rotation){.cosines = address(value[0]), .sines = address(value[1]), .width = value[3],
                                   .half = (int)value[4], .x = address(own[0]), .out = address(own[1]),
                                   .heads = own[2], .token = own[3], .head = own[4]};
    }
    Py_BEGIN_ALLOW_THREADS
    spread_rotations(&shares, (long)value[5]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
