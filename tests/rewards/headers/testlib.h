// The part of testlib.h that the checkers of these tests use; the real header is the user's own file.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
enum TResult { _ok = 0, _wa = 1, _pe = 2, _fail = 3 };
[[noreturn]] inline void quitf(TResult result, const char* format, ...) {
    va_list list; va_start(list, format); vfprintf(stderr, format, list); va_end(list);
    exit(result);
}
struct InStream {
    std::ifstream file; TResult fault = _fail;
    int readInt() {
        long long value;
        if (!(file >> value)) quitf(fault, "Expected integer");
        return (int)value;
    }
    bool seekEof() { return (file >> std::ws).eof(); }
} inf, ouf, ans;
inline void registerTestlibCmd(int argc, char* argv[]) {
    if (argc != 4) quitf(_fail, "not three files");
    inf.file.open(argv[1]); ouf.file.open(argv[2]); ans.file.open(argv[3]);
    ouf.fault = _pe;
}
