/* Products of inputs that were rounded to 8 bits (dynamic.h), with any instructions; an output after the other. */
/* The sums of products of 16 codes each: of the first 16 of block `at` of a group, and of the others. */
static inline ALWAYS void dynamic_dots(const uint8_t *codes, const DynamicInputs *x, int at, int *first,
                                             int *second)
{
    *first = *second = 0;
    for (int i = 0; i < 16; i++) {
        *first += codes[i] * x->codes[0][16 * at + i];
        *second += codes[16 + i] * x->codes[1][16 * at + i];
    }
}

/* One output of one row, whose blocks are there. */
static inline ALWAYS float dynamic_output(DynamicKind kind, const uint8_t *codes, const float *scales,
                                                const float *more, const DynamicInputs *x, int64_t blocks)
{
    float sums[4] = {0, 0, 0, 0};
    for (int64_t b = 0; b < blocks; b++) {
        int at = (int)(b % 4), first, second;
        const DynamicInputs *own = x + b / 4;
        dynamic_dots(codes + 32 * b, own, at, &first, &second);
        float value, other = 0;
        if (kind == TWO) {
            value = (float)(first + own->first_less[at]) * (own->scale[at] * scales[b]);
            other = (float)(second + (own->less[at] - own->first_less[at])) * (own->scale[at] * more[b]);
        } else {
            int less = kind == LEAST ? 0 : own->less[at];
            value = (float)(first + second + less) * (own->scale[at] * scales[b]);
            if (kind == LEAST)
                other = own->sum[at] * more[b];
        }
        SETTLE(value);
        SETTLE(other);
        if (kind != BIASED)
            value += other;
        sums[at] += value;
    }
    return ((sums[0] + sums[1]) + sums[2]) + sums[3];
}

/* Outputs [begin, end) of all rows; 0: there is no memory for it. */
static int dynamic_linear(const Linear *job, int64_t begin, int64_t end)
{
    int64_t blocks = job->inputs / DYNAMIC_BLOCK, groups = dynamic_groups(job->inputs);
    float *scales = malloc((size_t)(blocks * (2 * sizeof *scales + DYNAMIC_BLOCK)));
    if (scales == NULL)
        return 0;
    float *more = scales + blocks;
    uint8_t *codes = (uint8_t *)(more + blocks);
    DynamicKind kind = dynamic_kind(job);
    for (int64_t n = begin; n < end; n++) {
        Coded row = coded_row(job, n);
        for (int64_t b = 0; b < blocks; b++) {
            dynamic_scale(job, &row, b * DYNAMIC_BLOCK, scales + b, more + b);
            dynamic_codes(job, &row, b * DYNAMIC_BLOCK, codes + b * DYNAMIC_BLOCK);
        }
        for (int64_t r = 0; r < job->rows; r++) {
            const DynamicInputs *x = (const DynamicInputs *)job->packed + r * groups;
            float sum = kind == BIASED  ? dynamic_output(BIASED, codes, scales, more, x, blocks)
                        : kind == LEAST ? dynamic_output(LEAST, codes, scales, more, x, blocks)
                                        : dynamic_output(TWO, codes, scales, more, x, blocks);
            if (job->narrow)
                ((uint16_t *)job->y)[r * job->outputs + n] = float_half(sum);
            else
                ((float *)job->y)[r * job->outputs + n] = sum;
        }
    }
    free(scales);
    return 1;
}
