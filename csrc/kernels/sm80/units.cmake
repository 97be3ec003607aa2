# What a row of this family changes of its unit, for cmake/units.cmake: `unit`, its name.

# Rows that walk lists are units of their own: compiled together, some kernels get other registers.
if(row MATCHES "TileKind::List")
  string(APPEND unit "_list")
endif()

# And those of caches of 8 bits.
if(row MATCHES "DType::([A-Z0-9]+)")
  string(TOLOWER "${CMAKE_MATCH_1}" cache)
  string(APPEND unit "_${cache}")
endif()
