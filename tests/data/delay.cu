// One thread that does nothing for a while. tests/data/delay.sm_90.cubin: nvcc 13.0 -cubin -arch=sm_90
extern "C" __global__ void delay(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
