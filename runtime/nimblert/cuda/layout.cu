// Gather: element i of a dense destination, in the order of its memory, from where strides say.
//
// layout.ptx is what `nvcc -ptx -arch=compute_80 layout.cu` makes of this; the driver compiles it for the GPU it finds.

struct Gather {
    unsigned int count;       // elements
    int rank;                 // axes, at most 8, the outermost first
    unsigned int sizes[8];
    long long strides[8];     // of the source, in elements
};

template <typename T>
__device__ void gather(T *to, const T *from, const Gather &g) {
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < g.count; i += gridDim.x * blockDim.x) {
        unsigned int rest = i;
        long long offset = 0;
#pragma unroll
        for (int axis = 7; axis >= 0; --axis) {
            if (axis < g.rank) {
                const unsigned int above = rest / g.sizes[axis];
                offset += (rest - above * g.sizes[axis]) * g.strides[axis];
                rest = above;
            }
        }
        to[i] = from[offset];
    }
}

#define KERNEL(bytes, type)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) gather_##bytes(type *to, const type *from, Gather g) { \
        gather(to, from, g);                                                                      \
    }

KERNEL(1, unsigned char)
KERNEL(2, unsigned short)
KERNEL(4, unsigned int)
KERNEL(8, unsigned long long)
KERNEL(16, ulonglong2)
