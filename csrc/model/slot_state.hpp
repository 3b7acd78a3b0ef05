// What a state of the slot model is: slots, entries of the process table and the processes in them, fates and log; how
// a slot word moves, by next_word() of word.hpp; and the packing, in which states that differ by numbering are one.
// What the processes do is in slot_work.hpp and slot_model.hpp.
#pragma once

#include "coverage.hpp"
#include "explorer.hpp"

namespace model {

using busrl::State;

enum class SlotMutant : uint8_t {
    NONE,
    TIMEOUT,           // reaps without proof of death
    NO_SEQ,            // a claim does not raise seq
    NO_REREAD,         // the reaper does not read the entry again after the word
    NO_UID_CHECK,      // RESERVED goes forward by its uid alone, without last_commit_seq
    NO_ROLL_FORWARD,   // a dead dispatch is always undone
    NO_LOG_CHECK,      // the learner does not look whether a claimed sample is in the log
    FREE_FIRST,        // the slot is freed before the fate is stored
    DROP_FREE_FIRST,   // the same at a drop
    ENTRY_FIRST,       // the entry is freed before its slots are at rest
    SUCCESSOR_RUSHES,  // a dispatcher begins while its predecessor's slot is still RESERVED
    GIVES_UP,          // who finds the table full of dead entries does not reap
};

class SlotState {
  public:
    static constexpr int kMaxSlots = 2, kMaxEntries = 3, kMaxUids = 2, kSegments = 2;

    struct Config {
        int slots, entries, uids;
        bool drops;    // processes also drop samples, for no reason at all
        bool backs;    // and hand slots back
        int segments;  // of a sample; 0 = one, generated in one step, and a reward given in one step
        SlotMutant mutant = SlotMutant::NONE;
    };

    // Where a process is. Each name is the last thing that it did; those in main.cpp's list are crash points of csrc.
    enum Pc : uint8_t {
        IDLE,
        LOCKED,
        RETIRED,
        D_CLAIMED,
        D_RESERVED,
        D_WRITTEN,
        D_SEQ,
        D_UID,
        D_FATE,
        G_CLAIMED,
        G_CLEARED,
        G_COPYING,
        G_COPIED,
        G_STORED,
        G_COMMITTING,
        R_CLAIMED,
        R_COPYING,
        R_STORED,
        T_CLAIMED,
        T_LOGGED,
        T_FATE,
        T_FREED_EARLY,
        P_DROPPED,
        P_UID,
        P_SAME,
        P_FATE,
        P_FREED_EARLY,
        Q_IDENT,
        Q_FREE_LOCK,
        Q_SCAN,
        Q_WORD,
        Q_SAME_ENTRY,
        Q_DECIDED,
        Q_SCANNED,
        PCS
    };
    enum Payload : uint8_t { EMPTY, PARTIAL, WHOLE };
    enum Fate : uint8_t { NONE, DISPATCHED, TRAINED, REASON };

    struct Word {  // a copy of a control word; `old` means that seq has moved on since
        uint8_t state, owner, segs, old;
        bool operator==(const Word& o) const {
            return state == o.state && owner == o.owner && segs == o.segs && old == o.old;
        }
    };
    struct Slot {
        Word word;
        uint8_t uid;      // 0 = none
        uint8_t stamped;  // last_commit_seq is the seq of the word
        uint8_t segment[kSegments];
        uint8_t reward;
    };
    struct Process {     // an entry of the table (live, probed) and the process that holds its byte lock, if any
        uint8_t live;    // the entry names a process
        uint8_t probed;  // the lock of a dead process's entry is held for a moment by one that looks for a free entry
        uint8_t alive;
        uint8_t pc;
        uint8_t target;   // the entry being reaped
        uint8_t changed;  // the ident read from it is not its ident any more
        uint8_t slot;
        uint8_t reg;  // D, P: a uid; Q: bit 0 = this is the last slot of the scan, bit 1 = RESERVED goes forward
        Word word;
    };
    struct State {
        Slot slot[kMaxSlots];
        Process process[kMaxEntries + 1];  // the last one, `outsider`, has no entry: it found the table full and reaps
        uint8_t fate[kMaxUids];
        uint8_t logged[kMaxUids];
    };
    using Key = std::array<uint64_t, 2>;

    explicit SlotState(const Config& config) : c(config), outsider(config.entries) {}

    State initial() const {
        State s{};
        return s;
    }

    // ------------------------------------------------------------------------------------------------ packing

    // The smallest of all the packings that differ by numbering. What is in order already by fields that do not depend
    // on the numbering need not be tried in another.
    Key pack(const State& s) const {
        static constexpr int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
        uint32_t process[kMaxEntries] = {}, slot[kMaxSlots] = {}, uid[kMaxUids] = {};
        for (int k = 0; k < c.entries; ++k) process[k] = plain(s.process[k]);
        for (int j = 0; j < c.slots; ++j) slot[j] = plain(s.slot[j]);
        for (int u = 0; u < c.uids; ++u) uid[u] = uint32_t(s.fate[u]) << 1 | s.logged[u];
        Key best{};
        bool first = true;
        for (const auto& entry : orders) {
            if ((c.entries < 3 && entry[2] != 2) || (c.entries < 2 && entry[1] != 1)) continue;
            if (process[entry[0]] > process[entry[1]] && c.entries > 1) continue;
            if (process[entry[1]] > process[entry[2]] && c.entries > 2) continue;
            for (int flip_slots = 0; flip_slots < c.slots; ++flip_slots)
                for (int flip_uids = 0; flip_uids < c.uids; ++flip_uids) {
                    if (c.slots > 1 && slot[flip_slots] > slot[1 - flip_slots]) continue;
                    if (c.uids > 1 && uid[flip_uids] > uid[1 - flip_uids]) continue;
                    const Key key = pack_as(s, entry, flip_slots, flip_uids);
                    if (first || key < best) best = key;
                    first = false;
                }
        }
        return best;
    }

    State unpack(const Key& key) const {
        Bits<2> bits;
        bits.words = key;
        State s{};
        auto get = [&](uint32_t n) { return uint8_t(bits.get(n)); };
        for (int j = 0; j < c.slots; ++j) {
            Slot& slot = s.slot[j];
            slot.word = {get(4), get(2), get(2), 0};
            slot.uid = get(2);
            slot.stamped = get(1);
            const uint8_t payload = get(5);
            slot.segment[0] = payload % 3, slot.segment[1] = payload / 3 % 3, slot.reward = payload / 9;
        }
        for (int i = 0; i <= outsider; ++i) {
            Process& p = s.process[i];
            if (i != outsider) p.live = get(1), p.probed = get(1);
            p.alive = get(1), p.pc = get(6), p.target = get(2), p.changed = get(1), p.slot = get(1), p.reg = get(2);
            p.word = {get(4), get(2), get(2), 0};
            if (p.word.state == kOld) p.word = {0, 0, 0, 1};
        }
        for (int u = 0; u < c.uids; ++u) s.fate[u] = get(2), s.logged[u] = get(1);
        return s;
    }

  protected:
    using S = busrl::State;
    const Config c;
    const int outsider;

    // -- the slot word -------------------------------------------------------------------------------------------

    // The one CAS: by next_word() of word.hpp on the exact word `expected`. The copies of all others grow old.
    bool move(State& s, int j, const Word& expected, S to, uint8_t who, uint8_t segments = 0) const {
        Slot& slot = s.slot[j];
        if (!(slot.word == expected)) return false;
        const S from = S(slot.word.state);
        if (!busrl::is_allowed(from, to)) return false;
        coverage().arrow(from, to);
        constexpr uint64_t kSeq = 1;
        const uint64_t word =
            busrl::next_word(busrl::make_word(from, slot.word.owner, slot.word.segs, kSeq), to, who, segments);
        const bool grown = busrl::seq_of(word) != kSeq && !(c.mutant == SlotMutant::NO_SEQ && busrl::is_working(to));
        slot.word = {uint8_t(busrl::state_of(word)), uint8_t(busrl::owner_of(word)), uint8_t(busrl::segs_of(word)), 0};
        if (grown) {
            slot.stamped = 0;
            for (int i = 0; i <= outsider; ++i)
                if (has_word(s.process[i].pc) && s.process[i].slot == j) s.process[i].word = {0, 0, 0, 1};
        }
        if (to == S::FREE) {  // what lies in a free slot is garbage, but its uid is still there
            for (uint8_t& segment : slot.segment) segment = EMPTY;
            slot.reward = EMPTY;
        }
        return true;
    }

    static bool has_word(uint8_t pc) {
        return (pc >= D_CLAIMED && pc <= P_FREED_EARLY) || pc == Q_WORD || pc == Q_SAME_ENTRY || pc == Q_DECIDED;
    }
    static bool owns(uint8_t pc) { return pc >= D_CLAIMED && pc <= T_FATE; }
    static bool dispatches(uint8_t pc) { return pc >= D_CLAIMED && pc <= D_FATE; }
    static bool trains(uint8_t pc) { return pc >= T_CLAIMED && pc <= T_FREED_EARLY; }

    int homes_of(const State& s, int u) const {
        int homes = 0;
        for (int j = 0; j < c.slots; ++j) {
            const Slot& slot = s.slot[j];
            const S state = S(slot.word.state);
            if (slot.uid != u + 1 || state == S::FREE) continue;
            homes += state != S::RESERVED || (slot.stamped && s.fate[u] == DISPATCHED);
        }
        return homes;
    }

    // -- small helpers -------------------------------------------------------------------------------------------

    static State at(const State& s, int i, uint8_t pc) {
        State n = s;
        n.process[i].pc = pc;
        return n;
    }
    static void rest(Process& p) {
        p.pc = IDLE;
        p.target = p.changed = p.slot = p.reg = 0;
        p.word = {};
    }
    State idle(const State& s, int i) const {
        State n = s;
        rest(n.process[i]);
        if (i == outsider) n.process[i].alive = 0;
        return n;
    }
    static int index_of(uint8_t uid) { return uid == 0 ? 0 : uid - 1; }  // 0 only where a mutant has been at work
    bool holds(const State& s, int i) const { return s.slot[s.process[i].slot].word == s.process[i].word; }
    template <class Test>
    bool another(const State& s, int i, Test&& test) const {
        for (int k = 0; k < c.entries; ++k)
            if (k != i && s.process[k].alive && test(s.process[k].pc)) return true;
        return false;
    }

    // Steps after which a process is idle again, or as after another step: death comes in the state that follows.
    static void reached(size_t step) { coverage().killed_after[step] = true; }

  private:
    static uint32_t plain(const Process& p) {
        return uint32_t(p.pc) << 16 | uint32_t(p.word.state) << 12 | uint32_t(p.word.segs) << 8 | p.word.old << 4 |
               p.live << 3 | p.probed << 2 | p.alive << 1 | p.changed;
    }
    static uint32_t plain(const Slot& slot) {
        return uint32_t(slot.word.state) << 12 | uint32_t(slot.word.segs) << 8 | uint32_t(slot.reward) << 6 |
               uint32_t(slot.segment[0]) << 4 | uint32_t(slot.segment[1]) << 2 | slot.stamped << 1 | (slot.uid != 0);
    }

    static constexpr uint8_t kOld = 15;  // in the place of a state: a copy whose seq is old

    // entry[k] = the old number of what is now entry k; slots and uids are at most two, so a flip renames them.
    Key pack_as(const State& s, const int (&entry)[3], int flip_slots, int flip_uids) const {
        uint8_t now[kMaxEntries + 1] = {};  // old owner number -> new one
        for (int k = 0; k < c.entries; ++k) now[entry[k] + 1] = uint8_t(k + 1);
        auto uid = [&](uint8_t old) -> uint64_t { return old == 0 ? 0 : ((old - 1) ^ flip_uids) + 1; };
        auto owner = [&](const Word& w) -> uint64_t { return busrl::is_working(S(w.state)) ? now[w.owner] : w.owner; };
        Bits<2> bits;
        for (int j = 0; j < c.slots; ++j) {
            const Slot& slot = s.slot[j ^ flip_slots];
            bits.put(slot.word.state, 4), bits.put(owner(slot.word), 2), bits.put(slot.word.segs, 2);
            bits.put(uid(slot.uid), 2), bits.put(slot.stamped, 1);
            bits.put(slot.segment[0] + 3 * slot.segment[1] + 9 * slot.reward, 5);
        }
        for (int k = 0; k <= outsider; ++k) {
            const Process& p = s.process[k == outsider ? k : entry[k]];
            if (k != outsider) bits.put(p.live, 1), bits.put(p.probed, 1);
            bits.put(p.alive, 1), bits.put(p.pc, 6);
            bits.put(p.pc >= Q_IDENT ? now[p.target + 1] - 1 : 0, 2), bits.put(p.changed, 1);
            bits.put(has_slot(p) ? p.slot ^ flip_slots : 0, 1);
            bits.put(p.pc >= Q_IDENT ? p.reg : uid(p.reg), 2);
            bits.put(p.word.old ? kOld : p.word.state, 4), bits.put(owner(p.word), 2), bits.put(p.word.segs, 2);
        }
        for (int u = 0; u < c.uids; ++u) bits.put(s.fate[u ^ flip_uids], 2), bits.put(s.logged[u ^ flip_uids], 1);
        return bits.words;
    }
    static bool has_slot(const Process& p) { return has_word(p.pc) || (p.pc == Q_SCAN && p.reg == 1); }
};

}  // namespace model
