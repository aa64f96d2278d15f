// architectures: 90a
// The k best entries of a row of the indexer for few rows (model.md 6.5): what index_few.cu's index_pick gives of the same scores, in
// fewer trips to memory and barriers. common/bins.cuh has the choice. k at most 1024, at most 262,144 entries. Rows without a seat
// write nothing; a row that sees at most k entries takes all.
#include <stdint.h>

#include "common/bins.cuh"
#include "common/load.cuh"
#include "common/overlap.cuh"
#include "common/pages.cuh"

namespace {

using longwave::BatchRow;
using longwave::CHOICE_ROUNDS;
using longwave::ChoiceBins;
using longwave::ChoiceRoom;
using longwave::CHOOSERS;
using longwave::ChoiceSource;

// Entries of a group, of which the largest score is stored; rounds that are asked for before it is known what the row sees.
constexpr unsigned GROUP = 16, EARLY = 2;
// As many threads as registers would do for: the choice of eight rounds takes more than 80 of them, and no more than 96 are for it.
constexpr unsigned ROOM = 640;
// Beyond so many entries groups are chosen first.
constexpr unsigned UNGROUPED = longwave::CHOSEN_AT_ONCE * CHOICE_ROUNDS;

}  // namespace

// Grid tokens, CHOOSERS threads. As index_pick's: picks [tokens, k], ascending, and how many, picked [tokens]. stride a multiple of 64,
// scores aligned to 16 bytes.
//
// Where the block does not hold all scores it first chooses groups by their largest: all in the bin of the k-th and above it, at most
// 1,024, or else exactly k, the lower group among equals. The k best entries are in these and not below that bin: of an entry
// elsewhere, or below, each of k groups has one that comes before it.
extern "C" __global__ void __launch_bounds__(ROOM)
index_pick_bins(const BatchRow* rows, const uint32_t* scores, const uint32_t* largest, unsigned* picks, unsigned* picked,
                unsigned stride, unsigned k) {
    __shared__ __align__(16) ChoiceRoom room;
    __shared__ unsigned groups[longwave::MOST_CHOSEN];
    longwave::start_next();
    // The barrier of the first choice is behind it.
    room.clear();
    longwave::wait_before();
    const unsigned token = blockIdx.x, thread = threadIdx.x;
    scores += size_t(token) * stride;
    largest += size_t(token) * (stride / GROUP);
    // The first scores, the first of groups and the row: one trip. What of these is there is known when the row is.
    uint4 early[2][EARLY];
#pragma unroll
    for (unsigned r = 0; r < EARLY; r++) {
        const unsigned first = (r * CHOOSERS + thread) * 4;
        early[0][r] = early[1][r] = make_uint4(0, 0, 0, 0);
        longwave::load_16_here(first < stride, early[0][r], scores + first);
        longwave::load_16_here(first < stride / GROUP, early[1][r], largest + first);
    }
    // Both at once: the position would wait for the seat.
    const BatchRow row = {longwave::load_here(&rows[token].seat), longwave::load_here(&rows[token].position), 0, 0};
    const unsigned visible = row.visible_c4();
    unsigned* const out = picks + size_t(token) * k;
    if (visible <= k) {
        // A padded row sees nothing and says nothing.
        if (thread == 0 && row.seat != longwave::UNMAPPED) {
            picked[token] = visible;
        }
        for (unsigned i = thread; i < visible; i += CHOOSERS) {
            out[i] = i;
        }
        return;
    }
    if (thread == 0) {
        picked[token] = k;
    }
    const bool grouped = visible > UNGROUPED;
    ChoiceSource source = {grouped ? largest : scores, nullptr, grouped ? (visible + GROUP - 1) / GROUP : visible};
    ChoiceBins bins;
    uint32_t taken = 0;
    bool known = false, chosen_early = false;
    // Few rounds are here already, and take few instructions.
    if (source.rounds() <= EARLY) {
        uint32_t own[4 * EARLY];
#pragma unroll
        for (unsigned r = 0; r < EARLY; r++) {
            source.keep(own + 4 * r, grouped ? early[1][r] : early[0][r], r);
        }
        known = longwave::choose<EARLY>(source, own, k, grouped ? longwave::MOST_CHOSEN : k, 0, bins, room, taken);
        chosen_early = true;
    }
    for (unsigned choice = 0;; choice = 1) {
        const bool ends = choice == 1 || !grouped;
        if (!chosen_early) {
            uint32_t own[4 * CHOICE_ROUNDS];
#pragma unroll
            for (unsigned r = 0; r < CHOICE_ROUNDS; r++) {
                source.load(own + 4 * r, r);
            }
            known = longwave::choose<CHOICE_ROUNDS>(source, own, k, ends ? k : longwave::MOST_CHOSEN, choice, bins, room, taken);
        }
        if (!known) {
            taken = longwave::choose_by_bits(source, k, room);
        }
        unsigned* const to = ends ? out : groups;
        const unsigned chosen =
            longwave::each_in_order(taken, source.rounds(), room.totals[0],
                                    [&](unsigned r, unsigned c, unsigned place) { to[place] = source.index(r, c); });
        if (ends) {
            return;
        }
        __syncthreads();
        source = {scores, groups, chosen * GROUP};
        chosen_early = false;
    }
}
