// See ptx.h.
#include "ptx.h"

namespace longwave {

uint8_t statics;

namespace {

struct Barrier {
    int count, pending, bytes;
    unsigned phase;

    void move_on() {
        if (pending == 0 && bytes == 0) {
            pending = count;
            phase++;
        }
    }
};

std::map<uint32_t, Barrier> barriers;
unsigned arrived_at_cluster, cluster_phase;
std::map<unsigned, unsigned> phase_of_thread;
// Groups of products of every thread, the last one open; and what a warp's lanes brought for one of them.
std::map<unsigned, std::vector<std::vector<Product>>> products;
std::map<unsigned, std::vector<uint32_t>> brought;

Barrier& at(uint32_t barrier) {
    const auto found = barriers.find(barrier);
    if (found == barriers.end()) {
        device::fail("no barrier there");
    }
    return found->second;
}

void came(uint32_t barrier, unsigned bytes) {
    at(barrier).bytes -= static_cast<int>(bytes);
    at(barrier).move_on();
}

std::vector<std::vector<Product>>& own_products() {
    auto& own = products[device::thread()];
    if (own.empty()) {
        own.emplace_back();
    }
    return own;
}

// Byte `byte` of row `row` behind a descriptor: rows of 128 bytes, eight of them 1,024 apart, whose pieces change places.
const uint8_t* operand_byte(uint32_t descriptor, unsigned row, unsigned byte) {
    uint32_t at = ((descriptor & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + byte;
    at ^= (at >> 7 & 7) << 4;
    return device::shared(device::rank()) + at;
}

// Result i of a lane: row g or g + 8 of its warp's sixteen, column 8 n + 2 c or the next.
void multiply_e4m3(const Product& p) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (int i = 0; i < p.length; i++) {
        const unsigned row = warp * 16 + lane / 4 + i % 4 / 2 * 8, col = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        float sum = 0;
        for (unsigned k = 0; k < 128; k++) {
            sum += e4m3(*operand_byte(p.b >> 32, row, k)) * e4m3(*operand_byte(static_cast<uint32_t>(p.b), col, k));
        }
        p.d[i] = sum;
    }
}

void multiply_bf16(const Product& p) {
    if ((p.b >> 32 & 0x3fff) != 64 || p.b >> 62 != 1) {
        device::fail("a descriptor of another layout");
    }
    const unsigned lane = threadIdx.x % 32, first = device::thread() - lane;
    brought[device::thread()].assign(p.a, p.a + 4);
    __syncwarp();
    for (int i = 0; i < p.length; i++) {
        const unsigned row = i % 4 / 2, col = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        double sum = p.adds ? p.d[i] : 0.0;
        for (unsigned k = 0; k < 16; k++) {
            const uint32_t pair = brought[first + lane / 4 * 4 + k % 8 / 2][row + 2 * (k / 8)];
            uint16_t b;
            memcpy(&b, operand_byte(static_cast<uint32_t>(p.b), col, 2 * k), 2);
            sum += static_cast<double>(float_of(k % 2 ? pair >> 16 : pair)) * float_of(b);
        }
        p.d[i] = static_cast<float>(sum);
    }
    __syncwarp();
}

}  // namespace

uint32_t cluster_rank() { return device::rank(); }

void cluster_arrive_relaxed() {
    phase_of_thread[device::thread()] = cluster_phase;
    if (++arrived_at_cluster == blockDim.x * device::cluster_blocks()) {
        arrived_at_cluster = 0;
        cluster_phase++;
    }
}

void cluster_wait() {
    const unsigned phase = phase_of_thread[device::thread()];
    device::wait_until([phase] { return cluster_phase != phase; });
}

void sync_first(unsigned threads) {
    static unsigned arrived, phase;
    const unsigned own = phase;
    if (++arrived == threads) {
        arrived = 0;
        phase++;
    }
    device::wait_until([own] { return phase != own; });
}

void init_barrier(uint32_t barrier, uint32_t count) {
    barriers[barrier] = {static_cast<int>(count), static_cast<int>(count), 0, 0};
}

void arrive(uint32_t barrier) {
    Barrier& b = at(barrier);
    if (b.pending <= 0) {
        device::fail("more arrivals at a barrier than it counts");
    }
    b.pending--;
    b.move_on();
}

void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    at(barrier).bytes += static_cast<int>(bytes);
    arrive(barrier);
}

void wait(uint32_t barrier, uint32_t parity) {
    const Barrier* b = &at(barrier);
    device::wait_until([b, parity] { return (b->phase & 1) != parity; });
}

void send(uint32_t there, const void* bytes, unsigned count, uint32_t barrier_there) {
    if (there >> 24 != barrier_there >> 24) {
        device::fail("a store counts at a barrier of another block");
    }
    std::vector<uint8_t> copy(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + count);
    uint8_t* to = at_shared(there, count);
    device::later([=] {
        if (!device::lives(there >> 24)) {
            device::fail("a store to a block that has ended");
        }
        memcpy(to, copy.data(), copy.size());
        came(barrier_there, count);
    });
}

void copy_box(uint32_t to, const TensorMap& map, unsigned col, unsigned row, uint32_t barrier, uint16_t blocks) {
    if ((to & 0xffffff) % 1024) {
        device::fail("a box is not aligned");
    }
    for (unsigned block = 0; block < 16; block++) {
        if (blocks >> block & 1) {
            device::later([=, &map] {
                for (unsigned r = 0; r < map.box_rows; r++) {
                    for (unsigned piece = 0; piece < 8; piece++) {
                        uint8_t* there = device::shared(block) + (to & 0xffffff) + r * 128 + ((piece ^ r % 8) << 4);
                        const bool inside = row + r < map.rows && col + piece * 16 < map.cols;
                        inside ? memcpy(there, map.bytes + size_t(row + r) * map.cols + col + piece * 16, 16) : memset(there, 0, 16);
                    }
                }
                came(address_in(barrier, block), map.box_rows * 128);
            });
        }
    }
}

void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    const unsigned lane = threadIdx.x % 32, first = device::thread() - lane;
    std::vector<uint32_t>& own = brought[device::thread()];
    own.clear();
    for (float v : {a0, a1, a2, a3, b0, b1}) {
        own.push_back(__float_as_uint(v) & 0xffffe000u);
    }
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const unsigned row = i / 2, col = 2 * (lane % 4) + i % 2;
        double sum = d[i];
        for (unsigned k = 0; k < 8; k++) {
            const float a = __uint_as_float(brought[first + lane / 4 * 4 + k % 4][row + 2 * (k / 4)]);
            sum += static_cast<double>(a) * __uint_as_float(brought[first + col * 4 + k % 4][4 + k / 4]);
        }
        d[i] = static_cast<float>(sum);
    }
    __syncwarp();
}

void begin(const Product& product) { own_products().back().push_back(product); }

void wgmma_commit() { own_products().emplace_back(); }

void wait_for_products(int but) {
    while (static_cast<int>(own_products().size()) - 1 > but) {
        const std::vector<Product> group = own_products().front();
        own_products().erase(own_products().begin());
        for (const Product& p : group) {
            p.a ? multiply_bf16(p) : multiply_e4m3(p);
        }
    }
}

}  // namespace longwave
