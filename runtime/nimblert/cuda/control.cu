// The conditions of loops and branches: kernels that set those of conditional nodes.
//
// control.ptx is what `nvcc -ptx -arch=compute_80 control.cu` makes of this; the driver compiles it for the GPU it
// finds, and links the call of cudaGraphSetConditional.

// A trip of a loop follows while `*condition` holds, at most `limit` times: beyond that `*failed` becomes `loop`, the
// loop's number. `trips` counts, and starts anew where `is_first`.
extern "C" __global__ void go_on(cudaGraphConditionalHandle handle, const unsigned char *condition,
                                 unsigned long long *trips, unsigned long long limit, unsigned int *failed,
                                 unsigned int loop, unsigned int is_first) {
    const unsigned long long done = is_first ? 0 : *trips;
    const bool is_true = *condition != 0;
    if (is_true && done == limit) {
        *failed = loop;
    }
    *trips = done + 1;
    cudaGraphSetConditional(handle, is_true && done < limit);
}

// One of `count` bodies runs, that of number `*index` or the last.
extern "C" __global__ void choose(cudaGraphConditionalHandle handle, const unsigned char *index, unsigned int count) {
    cudaGraphSetConditional(handle, *index < count ? *index : count - 1);
}
