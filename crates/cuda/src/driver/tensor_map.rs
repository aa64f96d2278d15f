//! Maps of matrices for the copy engine (kernels/common/tensor_map.cuh): boxes of 128 columns of bytes, whose rows come to shared
//! memory in the order that `wgmma` reads.
//!
//! Assumes an address and a distance of rows that are multiples of sixteen; the driver refuses others. Needs Hopper.

use cudarc::driver::sys;

use super::error::{DriverError, check};

/// Columns of a box.
const BOX_COLS: u32 = 128;

/// A map, an argument of a launch.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub(super) sys::CUtensorMap);

impl TensorMap {
    /// Of `rows` rows of `cols` bytes, one after the other, at `address`, in boxes of up to 256 rows.
    pub fn new(address: u64, rows: u32, cols: u32, box_rows: u32) -> Result<TensorMap, DriverError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (dims, strides) = ([u64::from(cols), u64::from(rows)], [u64::from(cols)]);
        let (box_dims, element_strides) = ([BOX_COLS, box_rows], [1, 1]);
        // SAFETY: writes one map; the arrays have as many numbers as two dimensions need and live until the call returns. The
        // address is only written down.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2,
                address as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                box_dims.as_ptr(),
                element_strides.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result, || {
            format!("{rows} x {cols} bytes at {address:#x}, boxes of {box_rows}")
        })?;
        Ok(TensorMap(map))
    }
}
