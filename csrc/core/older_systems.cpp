// What newer versions of libstdc++ and glibc would provide, for a library that is compiled with one of them and runs on an
// older one. The version script keeps these definitions to this library.
#include <sstream>

#if __has_include(<sys/single_threaded.h>)  // glibc 2.32: whether std::shared_ptr counts without atomics; never, here
#include <sys/single_threaded.h>
char __libc_single_threaded;
#endif

#ifdef __GLIBCXX__  // of GCC 9 and 11: members of templates, which libstdc++ would have compiled
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
template std::string std::basic_stringbuf<char>::str() const &;
template std::string std::basic_stringbuf<char>::str() &&;
#endif
