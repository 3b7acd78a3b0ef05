// What the Python module busrl._ring is made of, but for its list of names, as one unit of compilation: the headers of
// pybind11 cost eleven seconds of each unit, which is more than any of these files.
#include "arrays.cpp"
#include "bulk.cpp"
#include "hot.cpp"
#include "watch.cpp"
