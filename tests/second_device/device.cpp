// A second device for tests: ordinary memory that torch takes for an accelerator's. Its numbers are the CPU's, so answers
// can be compared to the bit, and whatever mixes tensors of two devices fails as it would on a GPU.
//
// Every operation is done by torch's own fallback, which copies to the CPU and back; only what makes memory, moves bytes
// or looks at memory in another shape is here. Written after torch's description of PrivateUse1
// (docs.pytorch.org, "Facilitating New Backend Integration by PrivateUse1").
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {
constexpr auto kind = c10::DeviceType::PrivateUse1;
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, c10::Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(kind, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<kind>);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
// The same bytes seen as a CPU tensor.
at::Tensor as_cpu(const at::Tensor& x) {
  if (x.device().type() != kind) return x;
  auto storage = x.storage();
  auto whole = at::from_blob(const_cast<void*>(storage.data()), {static_cast<int64_t>(storage.nbytes())}, [storage](void*) {}, at::TensorOptions().dtype(at::kByte));
  auto out = at::empty({0}, at::TensorOptions().dtype(x.dtype()));
  out.set_(whole.storage(), x.storage_offset(), x.sizes(), x.strides());
  return out;
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  auto to = as_cpu(dst);
  to.copy_(as_cpu(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar(const at::Tensor& self) { return as_cpu(self).item(); }
// As on a GPU: numbers without a dimension may lie elsewhere, and so may what is indexed with.
bool may_mix(const std::string& name) { return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_"; }
void check_device(const c10::OperatorHandle& op, const at::Tensor& x) {
  TORCH_CHECK(!x.defined() || x.device().type() == kind || x.dim() == 0, "Expected all tensors to be on the same device, but ",
              op.schema().name(), " was given one on ", x.device());
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!may_mix(op.schema().name()))
    for (const auto& given : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (given.isTensor()) check_device(op, given.toTensor());
      if (given.isTensorList())
        for (const at::Tensor& x : given.toTensorList()) check_device(op, x);
    }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// Models count integers on devices that take them; a CPU counts only floating point numbers.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  return at::histc(as_cpu(self).to(at::kDouble), bins, least, most).to(self.device(), self.scalar_type());
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                       c10::SymInt groups) {
  std::optional<at::Tensor> own;
  if (bias && bias->defined()) own = as_cpu(*bias);
  return at::convolution_symint(as_cpu(input), as_cpu(weight), own, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
} hooks;
}  // namespace
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("convolution_overrideable", &convolution);
  m.impl("histc", &histc);
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { at::RegisterPrivateUse1HooksInterface(&hooks); }
