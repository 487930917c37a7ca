// Copies pages between the tensors of a KV cache group and a contiguous staging buffer.
//
// In the buffer GPU block i begins at i * block_bytes; its pages are contiguous, in the order of the
// group. A unit is up to 256 vectors of one page. Warps process units in a grid-stride loop; a warp
// loads a whole unit before it stores any of it. Each thread computes its addresses from the block
// id, the base of the page and its stride, so the host prepares nothing per page. The block ids are
// kernel parameters: a copy of them to the device would queue behind the copies of pages.
//
// `make kernels` compiles this file to kernels.ptx, for GPUs from Turing on.

typedef unsigned long long u64;

struct alignas(16) Vec16 { unsigned x, y, z, w; };

// One page of the group: address of row 0, stride of rows in bytes, bytes to copy, offset in a block.
struct Page { u64 base, stride, bytes, offset; };

// A chunk, without its block ids.
struct Chunk { char *stage; const Page *pages; u64 block_bytes; unsigned blocks, pages_per_block, units_per_page; };

template <int N> struct Blocks { int ids[N]; };

template <typename V, bool SCATTER, int N>
__device__ __forceinline__ void move(const Chunk &chunk, const Blocks<N> &blocks) {
    constexpr unsigned LOADS = 8, LANES = 32, UNIT = LOADS * LANES;
    const unsigned lane = threadIdx.x % LANES;
    const u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    const unsigned per_block = chunk.pages_per_block * chunk.units_per_page;
    const u64 units = (u64)per_block * chunk.blocks;
    for (u64 unit = blockIdx.x * (u64)(blockDim.x / LANES) + threadIdx.x / LANES; unit < units;
         unit += warps) {
        const unsigned block = unit / per_block;
        const unsigned rest = unit % per_block;
        const Page page = chunk.pages[rest / chunk.units_per_page];
        const u64 first = (u64)(rest % chunk.units_per_page) * UNIT;
        const u64 count = page.bytes / sizeof(V);
        V *paged = (V *)(page.base + (u64)blocks.ids[block] * page.stride);
        V *packed = (V *)(chunk.stage + block * chunk.block_bytes + page.offset);
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

#define KERNEL(NAME, V, SCATTER, N)                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        NAME##_##N(const __grid_constant__ Chunk chunk, const __grid_constant__ Blocks<N> blocks) { \
        move<V, SCATTER, N>(chunk, blocks);                                                        \
    }

// A chunk with few blocks needs few bytes of parameters. 8000 ids are near the limit of 32,764 bytes.
#define KERNELS(NAME, V, SCATTER)  \
    KERNEL(NAME, V, SCATTER, 128)  \
    KERNEL(NAME, V, SCATTER, 1000) \
    KERNEL(NAME, V, SCATTER, 8000)

KERNELS(gather16, Vec16, false)
KERNELS(scatter16, Vec16, true)
KERNELS(gather4, unsigned, false)
KERNELS(scatter4, unsigned, true)
KERNELS(gather1, unsigned char, false)
KERNELS(scatter1, unsigned char, true)
