#!/bin/bash
# Builds the core and every test_*.c here with sanitizers and runs them; `make test-c` calls it.
#
# All tests run under ASan and UBSan; those of the engine, which has threads, also under TSan. A test's own sources and
# linker flags stand in a line "link: ..." near its top. Objects are kept in build/test-c and made again when a source
# changes.
set -euo pipefail
cd "$(dirname "$0")/../../.."

compiler=${CC:-gcc}
flags=(-std=gnu11 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -Werror -pthread -Icsrc -Itests/core/c)
here=tests/core/c

newest_header=$(ls -t csrc/*.h | head -n 1)

# build_core KIND SANITIZERS
build_core() {
    local kind=$1 file object stale=()
    mkdir -p "build/test-c/$kind"
    for file in csrc/*.c; do
        object=build/test-c/$kind/$(basename "$file" .c).o
        [[ $object -nt $file && $object -nt $newest_header ]] || stale+=("$(basename "$file" .c)")
    done
    [ ${#stale[@]} -eq 0 ] && return
    printf '%s\n' "${stale[@]}" | xargs -P "$(nproc)" -I NAME \
        "$compiler" "${flags[@]}" "-fsanitize=$2" -c csrc/NAME.c -o "build/test-c/$kind/NAME.o"
}

# run_test KIND SANITIZERS FILE [ARGUMENTS]
run_test() {
    local kind=$1 sanitizers=$2 file=$3 name extra=()
    shift 3
    name=$(basename "$file" .c)
    read -ra extra <<<"$(sed -n 's/^.*link: *//p' "$file" | head -n 1 | sed "s#[a-z_]*\\.c#$here/&#g")"
    "$compiler" "${flags[@]}" "-fsanitize=$sanitizers" "$file" "${extra[@]}" build/test-c/"$kind"/*.o \
        -o "build/test-c/$kind/$name" -lm
    echo "test-c: $name ($sanitizers)"
    "build/test-c/$kind/$name" "$@"
}

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
build_core asan address,undefined
for test in "$here"/test_*.c; do run_test asan address,undefined "$test"; done
build_core tsan thread
run_test tsan thread "$here/test_engine.c" 60
run_test tsan thread "$here/test_overlap.c"
run_test tsan thread "$here/test_io.c"
run_test tsan thread "$here/test_trace.c"
