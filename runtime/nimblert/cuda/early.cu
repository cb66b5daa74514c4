// An upload that may start before the host has filled the page-locked memory that it reads, or told which it is.
//
// early.ptx is what `nvcc -ptx -arch=compute_80 early.cu` makes of this; the driver compiles it for the GPU it finds.

constexpr unsigned int BLOCK = 256;
constexpr unsigned int EACH = 4; // vectors of 16 bytes that a thread copies
constexpr unsigned int NEVER = ~0u;
constexpr unsigned int ELSEWHERE = 1u << 31;

struct Words {            // in page-locked memory
    unsigned int filled;  // parts, counted by the host; with ELSEWHERE, it has written the sources of all uploads
    unsigned int late;    // 1 where an upload has given up
};

struct Progress {         // in device memory, the counts 0 before and after
    unsigned int filled;  // as the first block has seen it, or NEVER for the end of its patience
    unsigned int done;    // blocks
    const uint4 *from;    // once `filled` is not 0
};

__device__ unsigned long long now_ns() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// The first block watches the host for all others: the GPU would make one read of the word after the other.
__device__ void watch(Words *words, const uint4 *volatile *source, Progress *progress, unsigned int end,
                      unsigned int patience_ns) {
    const unsigned long long begin = now_ns();
    unsigned int filled = 0, told = 0;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(filled) : "l"(&words->filled) : "memory");
        if (told == 0 && (filled & ELSEWHERE) != 0) {
            progress->from = *source;
        }
        filled &= ~ELSEWHERE;
        if (filled != told) {
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(&progress->filled), "r"(filled) : "memory");
            told = filled;
        }
        if (filled >= end) {
            return;
        }
    } while (now_ns() - begin < patience_ns);
    *static_cast<volatile unsigned int *>(&words->late) = 1;
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(&progress->filled), "r"(NEVER) : "memory");
}

// Whether that many parts were filled in time; what the host wrote before is then visible to this thread.
__device__ bool comes(Progress *progress, unsigned int wanted) {
    unsigned int filled;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(filled) : "l"(&progress->filled) : "memory");
    } while (filled < wanted);
    return filled != NEVER;
}

__device__ void copy(uint4 *to, const uint4 *from, unsigned int nbytes, unsigned int begin) {
    const unsigned int count = nbytes / 16;
    uint4 held[EACH];
#pragma unroll
    for (unsigned int each = 0; each < EACH; ++each) {
        const unsigned int i = begin + each * BLOCK + threadIdx.x;
        if (i < count) {
            held[each] = from[i];
        }
    }
#pragma unroll
    for (unsigned int each = 0; each < EACH; ++each) {
        const unsigned int i = begin + each * BLOCK + threadIdx.x;
        if (i < count) {
            to[i] = held[each];
        }
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < nbytes % 16) {
        const unsigned int i = count * 16 + threadIdx.x;
        reinterpret_cast<unsigned char *>(to)[i] = reinterpret_cast<const unsigned char *>(from)[i];
    }
}

// Each block after the first copies BLOCK * EACH vectors of one part, or leaves them as they are. They lie at `from`, or
// at `source` where the host says so. `first` is the number of the first part, `end` that of the part after the last.
extern "C" __global__ void __launch_bounds__(BLOCK)
    upload(uint4 *to, const uint4 *from, Words *words, const uint4 *volatile *source, Progress *progress,
           unsigned int nbytes, unsigned int part_nbytes, unsigned int first, unsigned int end,
           unsigned int patience_ns) {
    __shared__ const uint4 *ready;
    const unsigned int begin = (blockIdx.x - 1) * BLOCK * EACH;
    if (threadIdx.x == 0) {
        ready = nullptr;
        if (blockIdx.x == 0) {
            progress->from = from;
            watch(words, source, progress, end, patience_ns);
        } else if (comes(progress, first + begin / (part_nbytes / 16) + 1)) {
            ready = *const_cast<const uint4 *volatile *>(&progress->from);
        }
    }
    __syncthreads();
    if (ready != nullptr) {
        copy(to, ready, nbytes, begin);
    }
    if (threadIdx.x == 0 && atomicInc(&progress->done, gridDim.x - 1) == gridDim.x - 1) {
        progress->filled = 0;
    }
}
