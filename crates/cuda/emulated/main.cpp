// emulated NAME FIRST COUNT: runs COUNT cases of the kernels NAME from seed FIRST on.
#include <string>

#include "cases.h"

int main(int, char** arguments) {
    const std::string name = arguments[1];
    const unsigned first = atoi(arguments[2]), count = atoi(arguments[3]);
    for (unsigned seed = first; seed < first + count; seed++) {
        // Whatever ends the program says which case it was.
        printf("%s, seed %u\n", name.c_str(), seed);
        fflush(stdout);
        Fresh fresh(seed);
        if (name == "mhc") {
            check_mhc(fresh);
        } else if (name == "linear_bf16") {
            check_linear_bf16(fresh);
        } else {
            check_linear_fp8(fresh);
        }
    }
}
