# What a row of this family changes of its unit, for cmake/units.cmake: `unit`, its name, and `definitions`.

# Tiers are units of their own: compiled together, some kernels get other registers.
string(APPEND unit "_${tier}")

# So are rows of other kinds of tiles.
if(row MATCHES "TileKind::([A-Za-z]+)")
  string(TOLOWER "${CMAKE_MATCH_1}" kind)
  string(APPEND unit "_${kind}")
endif()

# wgmma of 48 and 80 columns, for half a tile of 96 keys and one of 80: their header takes 20 s to compile.
if(op STREQUAL "fwd" AND block_n MATCHES "^(80|96)$")
  set(definitions CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
endif()

# And those of caches of 8 bits.
if(row MATCHES "DType::([A-Z0-9]+)")
  string(TOLOWER "${CMAKE_MATCH_1}" cache)
  string(APPEND unit "_${cache}")
endif()
