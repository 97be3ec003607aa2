# What a row of this family changes of its unit, for cmake/units.cmake: `unit`, its name.

# Rows that walk lists are units of their own: compiled together, some kernels get other registers.
if(row MATCHES "TileKind::List")
  string(APPEND unit "_list")
endif()
