/* Functions of single numbers, each rounded once, as IEEE 754 says: the bits are the same with any instructions.
 *
 * Included once for each instruction set, after vectors.h. */

/* `count` numbers of an operand from `first` on, as floats. */
static inline void NAME(get)(const Operand *from, int64_t first, int64_t count, float *to)
{
    int64_t step = from->step[INNER];
    if (step == 1 && from->half)
        NAME(widen)((const uint16_t *)from->at + first, to, count);
    else if (step == 1)
        memcpy(to, (const float *)from->at + first, (size_t)count * sizeof *to);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = NAME(one)(from->at, from->half, first + i * step);
}

static inline void NAME(put)(const Operand *to, int64_t first, int64_t count, const float *from)
{
    int64_t step = to->step[INNER];
    if (step == 1 && to->half)
        NAME(narrow)(from, (uint16_t *)to->at + first, count);
    else if (step == 1)
        memcpy((float *)to->at + first, from, (size_t)count * sizeof *from);
    else
        for (int64_t i = 0; i < count; i++)
            if (to->half)
                ((uint16_t *)to->at)[first + i * step] = float_half(from[i]);
            else
                ((float *)to->at)[first + i * step] = from[i];
}

static inline void NAME(compute)(int way, float *a, const float *b, int64_t count)
{
    int64_t i;
    switch (way) { /* whole vectors: what lies behind the numbers is there, and not used */
    case NEGATE:
        for (i = 0; i < count; i += LANES)
            NAME(store)(a + i, -NAME(load)(a + i));
        break;
    case ADD:
        for (i = 0; i < count; i += LANES)
            NAME(store)(a + i, NAME(load)(a + i) + NAME(load)(b + i));
        break;
    case SUBTRACT:
        for (i = 0; i < count; i += LANES)
            NAME(store)(a + i, NAME(load)(a + i) - NAME(load)(b + i));
        break;
    case MULTIPLY:
        for (i = 0; i < count; i += LANES)
            NAME(store)(a + i, NAME(load)(a + i) * NAME(load)(b + i));
        break;
    default: /* COPY */
        break;
    }
}

/* The rows [begin, end) of all that are not one another's neighbours in the innermost dimension. */
static void NAME(pointwise)(const Pointwise *job, int64_t begin, int64_t end)
{
    float a[NUMBERS] = {0}, b[NUMBERS] = {0};
    for (int64_t row = begin; row < end; row++) {
        int64_t out_at = 0, a_at = 0, b_at = 0, left = row;
        for (int d = INNER - 1; d >= 0; d--) {
            int64_t index = left % job->size[d];
            left /= job->size[d];
            out_at += index * job->out.step[d];
            a_at += index * job->a.step[d];
            b_at += index * job->b.step[d];
        }
        for (int64_t from = 0; from < job->size[INNER]; from += NUMBERS) {
            int64_t count = job->size[INNER] - from < NUMBERS ? job->size[INNER] - from : NUMBERS;
            if (job->way == LOOK_UP) {
                const uint16_t *x = (const uint16_t *)job->a.at + a_at, *table = job->b.at;
                uint16_t *y = (uint16_t *)job->out.at + out_at;
                for (int64_t i = from; i < from + count; i++)
                    y[i * job->out.step[INNER]] = table[x[i * job->a.step[INNER]]];
                continue;
            }
            NAME(get)(&job->a, a_at + from * job->a.step[INNER], count, a);
            if (job->b.at != NULL)
                NAME(get)(&job->b, b_at + from * job->b.step[INNER], count, b);
            NAME(compute)(job->way, a, b, count);
            NAME(put)(&job->out, out_at + from * job->out.step[INNER], count, a);
        }
    }
}
