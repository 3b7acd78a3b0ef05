// What a fork()ed child must not inherit: mappings of the ring, and references to its lock descriptors.
//
//  * A child that kept the descriptor would keep its dead parent's byte lock alive, and its slots for ever.
//  * Where the mapping was, the child gets a page-less hole: touching an inherited view faults at once, and no later
//    allocation of the child can take the address and be written through a stale view.
// exec() needs none of this (O_CLOEXEC); the handler runs for plain fork() only.
#pragma once

#include <pthread.h>

#include <mutex>

namespace busrl {

class ForkGuarded {
  public:
    ForkGuarded(const ForkGuarded&) = delete;
    ForkGuarded& operator=(const ForkGuarded&) = delete;

  protected:
    ForkGuarded() = default;
    virtual ~ForkGuarded() = default;

    // Last in the constructor, first in the destructor of the final class: a fork() in another thread must never
    // find a half-made or half-destroyed object in the list.
    void guard() {
        std::lock_guard<std::mutex> hold(list().mutex);
        next_ = list().first;
        if (next_ != nullptr) next_->previous_ = this;
        list().first = this;
    }
    void unguard() {
        std::lock_guard<std::mutex> hold(list().mutex);
        if (next_ != nullptr) next_->previous_ = previous_;
        (previous_ != nullptr ? previous_->next_ : list().first) = next_;
        next_ = previous_ = nullptr;
    }
    virtual void in_child() noexcept = 0;  // async-signal-safe calls only

  private:
    struct List {
        std::mutex mutex;
        ForkGuarded* first = nullptr;
        List() { pthread_atfork(before, after_parent, after_child); }
    };
    static List& list() {
        static List* one = new List;  // never destroyed: handles may outlive static destructors
        return *one;
    }
    static void before() { list().mutex.lock(); }
    static void after_parent() { list().mutex.unlock(); }
    static void after_child() {
        for (ForkGuarded* item = list().first; item != nullptr; item = item->next_) item->in_child();
        list().mutex.unlock();
    }
    ForkGuarded* next_ = nullptr;
    ForkGuarded* previous_ = nullptr;
};

}  // namespace busrl
