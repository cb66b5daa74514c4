// Small kernels that between them use every kind of thing a cubin holds. tests/data/kernels.*.cubin come of it:
//   kernels.sm_80.cubin           nvcc 13.0 -cubin -arch=sm_80
//   kernels.sm_90a.cubin          nvcc 13.0 -cubin -arch=sm_90a
//   kernels.sm_90a.linked.cubin   nvcc 13.0 -rdc=true -dlink -cubin -arch=sm_90a
//   kernels.sm_90.cuda12.cubin    ptxas 12.8 on the PTX of nvcc 13.0 -ptx -arch=sm_90 with .version 8.5
#include <cstdio>

__constant__ float table[16] = {0, 1, 2, 3};
__device__ int visits[4];
__device__ float seeded[3] = {1.f, 2.f, 3.f};

__device__ __noinline__ float twice(float x) { return x * 2.f + table[3]; }
__device__ __noinline__ float deep(float x) { return twice(x) + seeded[1]; }

typedef float (*function)(float);
__device__ function functions[2] = {twice, deep};

// x: float[128], one block of 128 threads each.
extern "C" __global__ void scale(float *x) { x[threadIdx.x] = twice(x[threadIdx.x]); }

extern "C" __global__ void nested(float *x) { x[threadIdx.x] = deep(x[threadIdx.x]); }

extern "C" __global__ void indirect(float *x, int which) {
  x[threadIdx.x] = functions[which & 1](x[threadIdx.x]);
}

extern "C" __global__ void reverse(float *x) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[127 - threadIdx.x];
}

extern "C" __global__ void reverse_dynamic(float *x, int count) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = dynamic[count - 1 - threadIdx.x];
}

extern "C" __global__ void visit(float *x) {
  x[threadIdx.x] = (float)atomicAdd(&visits[threadIdx.x & 3], 0) + table[threadIdx.x & 3];
}

extern "C" __global__ void local(float *x, int shift) {
  float copy[8];
  for (int i = 0; i < 8; ++i) copy[(i + shift) & 7] = x[i];
  for (int i = 0; i < 8; ++i) x[i] = copy[(i * shift) & 7];
}

extern "C" __global__ void say(int number) { printf("number %d\n", number); }

template <class T> __global__ void __launch_bounds__(256) increase(T *x) { x[threadIdx.x] += T(1); }
template __global__ void increase<float>(float *);
template __global__ void increase<double>(double *);
