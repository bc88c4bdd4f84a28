/* Root mean square norms: each row divided by the root of its mean square, times weights. Included once for each
 * instruction set, after vectors.h. A row is summed in an order of its own, as everywhere here. */

static void NAME(norm)(const Norm *job, int64_t begin, int64_t end)
{
    int64_t width = job->width;
    for (int64_t row = begin; row < end; row++) {
        int64_t from = row * width, i;
        float sum = NAME(square_sum)((const char *)job->x + from * (job->half ? 2 : 4), job->half, width);
        float factor = 1.0f / sqrtf(sum / (float)width + job->eps);
        if (job->half) {
            const uint16_t *x = (const uint16_t *)job->x + from, *w = job->w;
            uint16_t *y = (uint16_t *)job->y + from;
            if (job->way == ROUNDED)
                for (i = 0; i < width; i++)
                    y[i] = float_half(NAME(one_b)(float_half(NAME(one_b)(x[i]) * factor)) * NAME(one_b)(w[i]));
            else
                for (i = 0; i < width; i++)
                    y[i] = float_half(NAME(one_b)(x[i]) * factor * (NAME(one_b)(w[i]) + job->more));
        } else {
            const float *x = (const float *)job->x + from, *w = job->w;
            float *y = (float *)job->y + from;
            for (i = 0; i < width; i++)
                y[i] = x[i] * factor * (w[i] + job->more);
        }
    }
}
