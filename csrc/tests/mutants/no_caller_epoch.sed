# Mutant of calls.hpp: a caller is known by its index alone.
s/line\.step\.load(std::memory_order_acquire) == epoch_of(ident);/line.step.load(std::memory_order_acquire) + epoch_of(ident) != 0;/
