// Moves pages between the tensors of a KV cache group and a contiguous staging buffer.
//
// In the buffer GPU block i lies at i * block_bytes, its pages one after another in the group's
// order. A unit is up to UNIT vectors of one page; a warp takes units in turn, loads a whole unit
// before it stores any of it, and works every address out from the block id, the page's base and
// its stride, so that nothing of it is prepared on the host.
//
// kernels.ptx is made of this file by `make kernels`, for any GPU since Turing.

typedef unsigned long long u64;

struct alignas(16) Vec16 { unsigned x, y, z, w; };

// One page of the group: where row 0 begins, bytes from row to row, bytes to copy, offset in block.
struct Page { u64 base, stride, bytes, offset; };

template <typename V, bool SCATTER>
__device__ __forceinline__ void move(char *stage, const Page *pages, const long long *blocks,
                                     u64 block_bytes, unsigned num_blocks, unsigned num_pages,
                                     unsigned units_per_page) {
    constexpr unsigned LOADS = 8, LANES = 32, UNIT = LOADS * LANES;
    const unsigned lane = threadIdx.x % LANES;
    const u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    const u64 per_block = (u64)num_pages * units_per_page;
    const u64 units = per_block * num_blocks;
    for (u64 unit = blockIdx.x * (u64)(blockDim.x / LANES) + threadIdx.x / LANES; unit < units;
         unit += warps) {
        const u64 block = unit / per_block;
        const unsigned rest = unit % per_block;
        const Page page = pages[rest / units_per_page];
        const u64 first = (u64)(rest % units_per_page) * UNIT;
        const u64 count = page.bytes / sizeof(V);
        V *paged = (V *)(page.base + (u64)blocks[block] * page.stride);
        V *packed = (V *)(stage + block * block_bytes + page.offset);
        V *dst = SCATTER ? paged : packed;
        const V *src = SCATTER ? packed : paged;
        V held[LOADS];
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) {
            const u64 at = first + k * LANES + lane;
            if (at < count) held[k] = src[at];
        }
#pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) {
            const u64 at = first + k * LANES + lane;
            if (at < count) dst[at] = held[k];
        }
    }
}

#define KERNEL(NAME, V, SCATTER)                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                             \
        NAME(char *stage, const Page *pages, const long long *blocks, u64 block_bytes,            \
             unsigned num_blocks, unsigned num_pages, unsigned units_per_page) {                  \
        move<V, SCATTER>(stage, pages, blocks, block_bytes, num_blocks, num_pages,                \
                         units_per_page);                                                         \
    }

KERNEL(gather16, Vec16, false)
KERNEL(scatter16, Vec16, true)
KERNEL(gather4, unsigned, false)
KERNEL(scatter4, unsigned, true)
KERNEL(gather1, unsigned char, false)
KERNEL(scatter1, unsigned char, true)
