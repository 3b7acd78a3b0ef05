// Model 5, "hosts": claims of other hosts (gateway.py, satellite.py). Home's keeper gives slots to lives of hosts for a
// lease, by messages that may be lost, doubled or late; on each host a satellite puts them into slots of a ring there.
//
// Modelled: a home with its samples, two hosts (of two names, or of one), two local slots each, a few messages
// on their way. Any message may be lost or doubled at any time, and that counts as no death. Deaths, at most so many:
// a satellite (its memory is gone, its ring stands), a host with its ring, home's ring, an engine that gives a sample
// up, a lease that ends while it is renewed, a task that is given to a dead host, a living host that home forgets. The
// rules: an answer is taken only for the claim that it was made for, of the ring that gave it, from the life that holds
// it; no sample is lost, trained twice or in two slots of a ring; from every state all samples are trained and all
// slots FREE, without another death.
//
// Left out: the keeper's memory (nothing here hangs on it: leases are read from the ring), which of an ended claim's
// late copies the satellite still knows (it may take any of them), JOIN as a message, weights and versions; that a
// later start of a host has the larger number is assumed.
#pragma once

#include "busrl/word.hpp"
#include "explorer.hpp"

namespace model {

enum class HostMutant : uint8_t {
    NONE,
    NO_RING,     // a life may join another ring than the one that it claimed from
    UID_ALONE,   // an answer counts by slot and uid
    HOST_LEASE,  // leases are renewed for a host: nobody compares what it holds
    LATE_TAKEN,  // an answer counts after its lease has ended
    NO_LIFE,     // a host is known by its name: a new life has the claims of the one before
    FORGETS,     // a satellite that is started again does not read its ring
    EARLY,       // a sample comes into a slot while it is in another one here
    SILENT       // what is late gets no answer
};

class HostModel {
    using W = busrl::State;

  public:
    static constexpr int kHosts = 2, kLocal = 2, kHeld = 3, kMessages = 4, kMost = 2;
    struct Config {
        uint8_t slots = 1, samples = 1, deaths = 1, messages = 3;
        bool one_name = false;
        HostMutant mutant = HostMutant::NONE;
    };
    enum Kind : uint8_t { NO_MESSAGE, TASK, RESULT, FAIL, ENDED };
    enum Place : uint8_t { WAITING = kLocal, NOWHERE };
    enum Fate : uint8_t { NO_FATE, D, T };

    struct Claim {
        uint8_t slot, seq, uid, ring;
        // What stands on the wire: the ring is no part of it.
        bool named(const Claim& o) const { return slot == o.slot && seq == o.seq && uid == o.uid; }
    };
    struct HomeSlot {
        uint8_t state, owner, seq, uid;
    };
    struct LocalSlot {
        uint8_t state;
        Claim claim;
    };
    struct Held {
        uint8_t used;
        Claim claim;
        uint8_t place, word, fail, lost;
    };
    struct Host {
        uint8_t alive, life, ring;  // life: number << 1 | name
        LocalSlot slot[kLocal];
        Held held[kHeld];
    };
    struct Message {
        uint8_t kind, life;
        Claim claim;
    };
    struct State {
        uint8_t ring, lives, deaths;
        HomeSlot slot[kMost];
        uint8_t fate[kMost], member[2];  // the life that has joined under each name, 0: none
        Host host[kHosts];
        Message message[kMessages];
    };
    using Key = std::array<uint64_t, 5>;

    explicit HostModel(const Config& config) : c(config) {}
    State initial() const {
        State s{};
        s.deaths = c.deaths;
        for (int i = 0; i < kHosts; ++i) begin_life(s, i, c.one_name ? 0 : i);
        return s;
    }

    const char* wrong(const State& s) const {
        for (int u = 0; u < c.samples; ++u) {
            int found = 0;
            for (int j = 0; j < c.slots; ++j) found += s.slot[j].state != FREE && s.slot[j].uid == u;
            if (found > 1) return "doubled: a sample is in two slots of home's ring";
            if ((found == 1) != (s.fate[u] == D)) return "lost: a dispatched sample is in no slot";
        }
        for (const Host& h : s.host)
            if (h.slot[0].state && h.slot[1].state && h.slot[0].claim.uid == h.slot[1].claim.uid)
                return "doubled: a sample is in two slots of a host's ring";
        return nullptr;
    }
    bool ended(const State& s) const {
        for (int u = 0; u < c.samples; ++u)
            if (s.fate[u] != T) return false;
        for (const Host& h : s.host) {
            for (const LocalSlot& x : h.slot)
                if (x.state) return false;
            for (const Held& one : h.held)
                if (one.used) return false;
        }
        return true;
    }

    template <class Out>
    void next(const State& s, Out&& out) const {
        home(s, out);
        for (int i = 0; i < kHosts; ++i) {
            if (s.host[i].alive)
                host(s, i, out);
            else
                come_back(s, i, out);
        }
        for (int k = 0; k < kMessages; ++k)
            if (s.message[k].kind) deliver(s, k, out);
    }

  private:
    const Config c;
    static constexpr uint8_t FREE = uint8_t(W::FREE), QUEUED = uint8_t(W::QUEUED), RUNS = uint8_t(W::GENERATING),
                             READY = uint8_t(W::GENERATED), SENT = uint8_t(W::TRAINING);

    static void begin_life(State& s, int i, int name) {
        s.host[i] = {};
        s.host[i].alive = 1, s.host[i].life = uint8_t(++s.lives << 1 | name), s.host[i].ring = s.ring;
        for (Held& one : s.host[i].held) one.place = NOWHERE;
    }
    static int name_of(uint8_t life) { return life & 1; }
    static bool lives(const State& s, uint8_t life) {
        for (const Host& h : s.host)
            if (h.alive && h.life == life) return true;
        return false;
    }
    static const Held* holding(const Host& h, const Claim& claim) {
        for (const Held& one : h.held)
            if (one.used && one.claim.named(claim)) return &one;
        return nullptr;
    }
    bool leased(const State& s, uint8_t life, const Claim& claim) const {
        const HomeSlot& x = s.slot[claim.slot];
        return x.state == RUNS && x.owner == life && x.seq == claim.seq && x.uid == claim.uid;
    }
    // A message that finds no room is lost, as any may be; one that is there already is there.
    void send(State& s, Kind kind, uint8_t life, const Claim& claim) const {
        for (const Message& m : s.message)
            if (m.kind == kind && m.life == life && m.claim.named(claim) && m.claim.ring == claim.ring) return;
        for (int k = 0; k < c.messages; ++k)
            if (!s.message[k].kind) {
                s.message[k] = {kind, life, claim};
                return;
            }
    }
    bool room(const State& s) const { return s.message[c.messages - 1].kind == NO_MESSAGE; }
    static void forget(Held& one) {
        one = {};
        one.place = NOWHERE;
    }

    // -- home: scheduler and learner in short, and the keeper

    template <class Out>
    void home(const State& s, Out&& out) const {
        for (int j = 0; j < c.slots; ++j) {
            const HomeSlot& x = s.slot[j];
            State n = s;
            HomeSlot& y = n.slot[j];
            for (int u = 0; x.state == FREE && u < c.samples; ++u) {
                if (s.fate[u] != NO_FATE) continue;
                n = s;
                y = {QUEUED, 0, x.seq, uint8_t(u)}, n.fate[u] = D;
                out(n, {"home dispatches sample %d in slot %d", u, j});
                break;
            }
            if (x.state == READY) {
                y = {FREE, 0, uint8_t(x.seq + 1), 0}, n.fate[x.uid] = T;
                out(n, {"home trains sample %d", x.uid, 0, false, s.fate[x.uid] == T ? "trained twice" : nullptr});
            }
            if (x.state == QUEUED) grant(s, j, out);
            if (x.state == RUNS) lease(s, j, out);
        }
        for (int name = 0; name < 2; ++name) silence(s, name, out);
        if (s.deaths > 0 && s.ring == 0) {
            State n = s;
            --n.deaths, ++n.ring;
            for (HomeSlot& x : n.slot) x = {};
            for (uint8_t& fate : n.fate) fate = fate == T ? T : NO_FATE;
            n.member[0] = n.member[1] = 0;
            out(n, {"home's ring is lost", 0, 0, true});
        }
    }

    template <class Out>
    void grant(const State& s, int j, Out&& out) const {
        for (uint8_t life : s.member) {
            const bool dead = !lives(s, life);
            if (!life || (dead && s.deaths == 0)) continue;
            State n = s;
            n.deaths = uint8_t(s.deaths - dead);
            n.slot[j].state = RUNS, n.slot[j].owner = life, ++n.slot[j].seq;
            send(n, TASK, life, claim_of(n, j));
            out(n, {"home gives slot %d to life %d", j, life, dead});
        }
    }
    static Claim claim_of(const State& s, int j) { return {uint8_t(j), s.slot[j].seq, s.slot[j].uid, s.ring}; }

    template <class Out>
    void lease(const State& s, int j, Out&& out) const {
        const uint8_t life = s.slot[j].owner;
        const bool dead = !lives(s, life);
        const Claim claim = claim_of(s, j);
        State n = s;
        if (dead || s.deaths > 0) {
            n.slot[j].state = QUEUED, n.slot[j].owner = 0;
            n.deaths = uint8_t(s.deaths - !dead);
            out(n, {"the lease of slot %d ends, of life %d", j, life, !dead});
        }
        if (dead || !room(s) || c.mutant == HostMutant::HOST_LEASE) return;
        for (const Host& h : s.host)
            if (h.alive && h.life == life && !holding(h, claim)) {
                n = s;
                send(n, TASK, life, claim);
                out(n, {"home sends slot %d again, which life %d does not name", j, life});
            }
    }

    template <class Out>
    void silence(const State& s, int name, Out&& out) const {
        const uint8_t life = s.member[name];
        const bool alive = lives(s, life);
        for (int j = 0; j < c.slots; ++j)
            if (s.slot[j].state == RUNS && s.slot[j].owner == life) return;
        if (!life || (alive && s.deaths == 0)) return;
        State n = s;
        n.member[name] = 0, n.deaths = uint8_t(s.deaths - alive);
        out(n, {"home forgets life %d, which is silent", life, 0, alive});
    }

    // -- a host

    template <class Out>
    void come_back(const State& s, int i, Out&& out) const {
        if (s.host[i].ring == 3) return;  // it was replaced, and stays away
        State n = s;
        begin_life(n, i, name_of(s.host[i].life));
        out(n, {"host %d starts with an empty ring, as life %d", i, n.host[i].life});
    }

    template <class Out>
    void host(const State& s, int i, Out&& out) const {
        const Host& h = s.host[i];
        State n = s;
        Host& g = n.host[i];
        membership(s, i, out);
        for (int k = 0; k < kHeld; ++k)
            if (h.held[k].used) tend(s, i, k, out);
        for (int j = 0; j < kLocal; ++j) local(s, i, j, out);
        if (s.deaths == 0) return;
        --n.deaths;
        for (Held& one : g.held) forget(one);
        for (int j = 0, k = 0; j < kLocal; ++j) {
            LocalSlot& x = g.slot[j];
            if (x.state == SENT) x.state = READY;
            if (x.state != FREE && c.mutant != HostMutant::FORGETS) g.held[k++] = {1, x.claim, uint8_t(j), 0, 0, 0};
        }
        out(n, {"the satellite of host %d is killed, and reads its ring", i, 0, true});
        n = s;
        --n.deaths;
        const uint8_t life = h.life;
        g = {};
        g.life = life;
        out(n, {"host %d is lost with its ring", i, 0, true});
    }

    template <class Out>
    void membership(const State& s, int i, Out&& out) const {
        const Host& h = s.host[i];
        const uint8_t member = s.member[name_of(h.life)];
        State n = s;
        if (member > h.life) {
            n.host[i] = {};
            n.host[i].life = h.life, n.host[i].ring = 3;
            out(n, {"host %d is told that it was replaced, and ends", i});
        } else if (member < h.life && (h.ring == s.ring || c.mutant == HostMutant::NO_RING)) {
            n.member[name_of(h.life)] = h.life;
            for (int j = 0; j < c.slots; ++j)
                if (member && s.slot[j].state == RUNS && s.slot[j].owner == member) {
                    const bool kept = c.mutant == HostMutant::NO_LIFE;
                    n.slot[j].state = kept ? RUNS : QUEUED, n.slot[j].owner = kept ? h.life : 0;
                }
            out(n, {"host %d joins as life %d", i, h.life});
        }
        if (h.ring == s.ring) return;
        n = s;
        begin_life(n, i, name_of(h.life));
        out(n, {"the relay of host %d sees another ring of home: life %d begins", i, n.host[i].life});
    }

    // One step for a claim that the satellite holds.
    template <class Out>
    void tend(const State& s, int i, int k, Out&& out) const {
        const Host& h = s.host[i];
        const Held& one = h.held[k];
        State n = s;
        Host& g = n.host[i];
        Held& own = g.held[k];
        if (one.place == WAITING) return place(s, i, k, out);
        const LocalSlot& x = h.slot[one.place];
        const bool here = x.state != FREE && x.claim.uid == one.claim.uid;
        if (one.word || one.fail) {
            if (!room(s)) return;
            send(n, one.word ? RESULT : FAIL, h.life, one.word ? x.claim : one.claim);
            return out(n, {"host %d sends again what became of slot %d", i, one.claim.slot});
        }
        if (!here && one.lost) {
            forget(own);
            out(n, {"host %d forgets its claim on slot %d", i, one.claim.slot});
        } else if (!here) {
            own.fail = 1;
            send(n, FAIL, h.life, one.claim);
            out(n, {"host %d hands slot %d back", i, one.claim.slot});
        } else if (one.lost && x.state == QUEUED) {
            g.slot[one.place] = {};
            out(n, {"host %d drops its copy of slot %d", i, one.claim.slot});
        } else if (!one.lost && room(s) && s.member[name_of(h.life)] == h.life && !leased(s, h.life, one.claim)) {
            send(n, ENDED, h.life, one.claim);
            out(n, {"home tells host %d that slot %d is not its own", i, one.claim.slot});
        }
    }

    template <class Out>
    void place(const State& s, int i, int k, Out&& out) const {
        const Host& h = s.host[i];
        const uint8_t uid = h.held[k].claim.uid;
        for (const Held& one : h.held)
            if (one.used && one.place < WAITING && one.claim.uid == uid && c.mutant != HostMutant::EARLY) return;
        for (uint8_t j = 0; j < kLocal; ++j) {
            if (h.slot[j].state != FREE) continue;
            State n = s;
            n.host[i].slot[j] = {QUEUED, h.held[k].claim}, n.host[i].held[k].place = j;
            return out(n, {"host %d puts slot %d into its ring", i, h.held[k].claim.slot});
        }
    }

    // One step of engines, and the satellite's look at what they have committed.
    template <class Out>
    void local(const State& s, int i, int j, Out&& out) const {
        const LocalSlot& x = s.host[i].slot[j];
        State n = s;
        Host& g = n.host[i];
        LocalSlot& y = g.slot[j];
        if (x.state == QUEUED) {
            y.state = RUNS;
            out(n, {"an engine of host %d takes local slot %d", i, j});
        } else if (x.state == RUNS) {
            y.state = READY;
            out(n, {"an engine of host %d commits local slot %d", i, j});
            y.state = QUEUED;
            out(n, {"an engine of host %d dies, local slot %d rests", i, j, true});
            if (s.deaths == 0) return;
            y = {}, --n.deaths;
            out(n, {"an engine of host %d gives local slot %d up", i, j, true});
        } else if (x.state == READY) {
            Held* own = nullptr;
            for (Held& one : g.held)
                if (one.used && one.claim.named(x.claim)) own = &one;
            if (own && !own->lost) {
                own->word = 1, own->place = uint8_t(j), y.state = SENT;
                send(n, RESULT, g.life, x.claim);
                return out(n, {"host %d sends the answer in local slot %d", i, j});
            }
            if (own) forget(*own);
            y = {};
            out(n, {"host %d frees local slot %d, which is nobody's", i, j});
        }
    }

    // -- messages

    template <class Out>
    void deliver(const State& s, int k, Out&& out) const {
        const Message m = s.message[k];
        State without = s;
        without.message[k] = {};
        for (int j = k; j + 1 < kMessages; ++j) std::swap(without.message[j], without.message[j + 1]);
        out(without, {"a message about slot %d to or from life %d is lost, or changes nothing", m.claim.slot, m.life});
        if (m.kind == RESULT || m.kind == FAIL) return settle(s, without, m, out);
        for (int i = 0; i < kHosts; ++i) {
            const Host& h = s.host[i];
            if (!h.alive || (h.life != m.life && !(c.mutant == HostMutant::NO_LIFE && same_name(h.life, m.life))))
                continue;
            for (const State* base : {static_cast<const State*>(&without), &s}) {
                State n = *base;
                if (m.kind == TASK ? !take(n.host[i], m.claim) : !end_claim(n.host[i], m.claim)) continue;
                out(n, {m.kind == TASK ? "host %d hears of its claim on slot %d"
                                       : "host %d hears that its claim on slot %d has ended",
                        i, m.claim.slot, base == &s});
            }
        }
    }
    static bool same_name(uint8_t a, uint8_t b) { return name_of(a) == name_of(b); }

    static bool take(Host& h, const Claim& claim) {
        if (holding(h, claim)) return false;
        for (Held& one : h.held)
            if (!one.used) {
                one = {1, claim, WAITING, 0, 0, 0};
                return true;
            }
        return false;
    }

    static bool end_claim(Host& h, const Claim& claim) {
        for (Held& one : h.held) {
            if (!one.used || !one.claim.named(claim)) continue;
            LocalSlot* x = one.place < WAITING ? &h.slot[one.place] : nullptr;
            if (one.word) {
                *x = {};
                forget(one);
                return true;
            }
            one.lost = 1;
            if (!x || x->state == FREE || x->claim.uid != one.claim.uid)
                forget(one);
            else if (x->state == QUEUED)
                *x = {};
            return true;
        }
        return false;
    }

    // Home hears what became of a claim.
    template <class Out>
    void settle(const State& s, const State& without, const Message& m, Out&& out) const {
        const uint8_t member = s.member[name_of(m.life)];
        const bool by_name = c.mutant == HostMutant::NO_LIFE;
        if (!member || (member != m.life && !by_name)) return;  // it is told to join, or that it was replaced
        const HomeSlot& x = s.slot[m.claim.slot];
        bool counts = leased(s, by_name ? member : m.life, m.claim);
        if (c.mutant == HostMutant::UID_ALONE) counts = x.state == RUNS && x.owner == m.life && x.uid == m.claim.uid;
        if (c.mutant == HostMutant::LATE_TAKEN && m.kind == RESULT)
            counts = (x.state == RUNS || x.state == QUEUED) && x.uid == m.claim.uid && x.seq == m.claim.seq;
        if (!counts && c.mutant == HostMutant::SILENT) return;
        for (const State* base : {static_cast<const State*>(&without), &s}) {
            State n = *base;
            if (counts) n.slot[m.claim.slot].state = m.kind == RESULT ? READY : QUEUED, n.slot[m.claim.slot].owner = 0;
            send(n, ENDED, m.life, m.claim);
            const char* text = !counts            ? "home answers that slot %d is over for life %d"
                               : m.kind == RESULT ? "home takes the answer for slot %d of life %d"
                                                  : "home takes slot %d back from life %d";
            out(n, {text, m.claim.slot, m.life, base == &s, counts ? broken(s, m) : nullptr});
        }
    }
    // What the claim's name does not say, and what the rules are there for.
    const char* broken(const State& s, const Message& m) const {
        const HomeSlot& x = s.slot[m.claim.slot];
        if (m.claim.ring != s.ring) return "an answer for another ring is taken";
        if (x.state != RUNS) return "an answer is taken after its lease ended";
        if (s.member[name_of(m.life)] != m.life) return "an answer of a life that is over is taken";
        if (x.seq != m.claim.seq || x.owner != m.life) return "an answer of another claim is taken";
        return nullptr;
    }

  public:
    // Messages have no order: the same ones in another order are the same state.
    Key pack(const State& given) const {
        State s = given;
        std::sort(std::begin(s.message), std::end(s.message), [](const Message& a, const Message& b) {
            if (!a.kind != !b.kind) return !b.kind;
            return std::memcmp(&a, &b, sizeof a) < 0;
        });
        Bits<5> b;
        walk(s, [&](auto& field, uint32_t bits) { b.put(field, bits); });
        return b.words;
    }
    State unpack(const Key& key) const {
        Bits<5> b;
        b.words = key;
        State s{};
        walk(s, [&](auto& field, uint32_t bits) { field = uint8_t(b.get(bits)); });
        return s;
    }

  private:
    template <class Do>
    static void walk(State& s, Do&& each) {
        auto claim = [&](Claim& x) { each(x.slot, 1), each(x.seq, 3), each(x.uid, 1), each(x.ring, 1); };
        each(s.ring, 1), each(s.lives, 3), each(s.deaths, 2);
        for (HomeSlot& x : s.slot) each(x.state, 4), each(x.owner, 4), each(x.seq, 3), each(x.uid, 1);
        for (int k = 0; k < kMost; ++k) each(s.fate[k], 2), each(s.member[k], 4);
        for (Host& h : s.host) {
            each(h.alive, 1), each(h.life, 4), each(h.ring, 2);
            for (LocalSlot& x : h.slot) each(x.state, 4), claim(x.claim);
            for (Held& one : h.held) {
                each(one.used, 1), claim(one.claim), each(one.place, 2);
                each(one.word, 1), each(one.fail, 1), each(one.lost, 1);
            }
        }
        for (Message& m : s.message) each(m.kind, 3), each(m.life, 4), claim(m.claim);
    }
};

}  // namespace model
