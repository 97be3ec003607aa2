// Symbols of newer versions of libstdc++ and glibc, so that a library compiled with them runs with older ones. The
// version script does not export them.
#include <sstream>

#if __has_include(<sys/single_threaded.h>)  // glibc 2.32: if it is 0, std::shared_ptr counts with atomics
#include <sys/single_threaded.h>
char __libc_single_threaded;
#endif

#ifdef __GLIBCXX__  // template members that libstdc++ exports since GCC 9 and 11
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
template std::string std::basic_stringbuf<char>::str() const &;
template std::string std::basic_stringbuf<char>::str() &&;
#endif
