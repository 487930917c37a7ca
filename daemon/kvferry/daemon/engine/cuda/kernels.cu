// Moves pages between the tensors of a KV cache group and a contiguous staging buffer.
//
// In the buffer GPU block i lies at i * block_bytes, its pages one after another in the group's
// order. A unit is up to 256 vectors of one page; a warp takes units in turn, loads a whole unit
// before it stores any of it, and works every address out from the block id, the page's base and
// its stride, so that nothing of it is prepared on the host. The block ids come as a parameter:
// a copy of their own would queue behind the pages that the copy engines are busy with.
//
// kernels.ptx is made of this file by `make kernels`, for any GPU since Turing.

typedef unsigned long long u64;

struct alignas(16) Vec16 { unsigned x, y, z, w; };

// One page of the group: where row 0 begins, bytes from row to row, bytes to copy, offset in block.
struct Page { u64 base, stride, bytes, offset; };

// What a piece is, besides its block ids.
struct Piece { char *stage; const Page *pages; u64 block_bytes; unsigned blocks, pages_per_block, units_per_page; };

template <int N> struct Blocks { int ids[N]; };

template <typename V, bool SCATTER, int N>
__device__ __forceinline__ void move(const Piece &piece, const Blocks<N> &blocks) {
    constexpr unsigned LOADS = 8, LANES = 32, UNIT = LOADS * LANES;
    const unsigned lane = threadIdx.x % LANES;
    const u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
    const unsigned per_block = piece.pages_per_block * piece.units_per_page;
    const u64 units = (u64)per_block * piece.blocks;
    for (u64 unit = blockIdx.x * (u64)(blockDim.x / LANES) + threadIdx.x / LANES; unit < units;
         unit += warps) {
        const unsigned block = unit / per_block;
        const unsigned rest = unit % per_block;
        const Page page = piece.pages[rest / piece.units_per_page];
        const u64 first = (u64)(rest % piece.units_per_page) * UNIT;
        const u64 count = page.bytes / sizeof(V);
        V *paged = (V *)(page.base + (u64)blocks.ids[block] * page.stride);
        V *packed = (V *)(piece.stage + block * piece.block_bytes + page.offset);
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
        NAME##_##N(const __grid_constant__ Piece piece, const __grid_constant__ Blocks<N> blocks) { \
        move<V, SCATTER, N>(piece, blocks);                                                        \
    }

// A piece of few blocks takes few bytes of parameters; 8000 ids are near the limit of 32,764 bytes.
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
