// A pretended accelerator for tests: devices "pretend:0" and "pretend:1".
//
// Device memory is host memory, and every operation is computed by the CPU's kernel, so numbers are
// the CPU's. What is pretended is the discipline of an accelerator: all operands on one device, the
// host waits where it reads a result, copies may happen late, a capture allows no waits.
//
// A device storage owns a host storage over the same bytes (`Block`). An operation gets host tensors
// over those, and what it returns is wrapped again (`Call`). Tests use it through pretended.py.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);  // its header takes ten seconds to compile
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
const auto BELOW_AUTOGRAD = c10::autograd_dispatch_keyset | DispatchKeySet(DispatchKey::ADInplaceOrView);

thread_local DeviceIndex current = 0;

// ---- what tests switch and read -----------------------------------------------------------------

struct Rules {
  std::atomic<bool> counting{false};   // count kernels, tell waits
  std::atomic<bool> late{false};       // as MPS: no float64, and copies that do not block happen at the next wait
  std::atomic<bool> capturing{false};  // as while a CUDA stream is captured
} rules;

using Told = void (*)(const char* what);
std::atomic<Told> on_wait{nullptr};  // the host waits, and why
std::atomic<Told> on_late{nullptr};  // a copy that will happen late was asked for

std::mutex mutex;  // of what follows in this section
std::map<std::string, int64_t> kernels;
std::vector<std::string> violations;

struct Upload {  // from the host
  int64_t number;
  c10::weak_intrusive_ptr<StorageImpl> source;
  bool pinned;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  at::Tensor before;  // what it held
};
std::vector<Upload> uploads;
int64_t uploads_ever = 0;

at::Tensor host_tensor(c10::Storage storage, caffe2::TypeMeta dtype, c10::IntArrayRef sizes,
                       c10::IntArrayRef strides, int64_t offset) {
  auto t = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), dtype);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  auto x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == y.nbytes() && (x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

// Raises where the source of a late copy is gone or changed. Pinned memory may be released: its
// allocator waits for the device.
void check_uploads() {
  if (!rules.late) return;
  std::string wrong;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& one : uploads) {
      auto storage = one.source.lock();
      const char* what = nullptr;
      if (!storage) {
        if (!one.pinned) what = "released";
      } else if (!same_bytes(host_tensor(c10::Storage(storage), one.dtype, one.sizes, one.strides, one.offset), one.before)) {
        what = "overwritten";
      }
      if (what != nullptr) {
        wrong = std::to_string(one.number) + " " + what;
        violations.push_back(wrong);
        break;
      }
    }
    if (!wrong.empty()) uploads.clear();
  }
  TORCH_CHECK(wrong.empty(), "late copy ", wrong, ": its host memory must stay as it is until somebody waits for the device");
}

// The host waits until the device has done all it was given.
void wait(const char* what) {
  TORCH_CHECK(!rules.capturing, "operation not permitted when stream is capturing: ", what);
  check_uploads();
  {
    std::lock_guard<std::mutex> lock(mutex);
    uploads.clear();
  }
  if (rules.counting && on_wait.load() != nullptr) on_wait.load()(what);
}

void count(const std::string& kernel, int64_t times = 1) {
  if (!rules.counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  kernels[kernel] += times;
}

// ---- memory -------------------------------------------------------------------------------------

struct Block {
  c10::Storage host;
};
void release(void* block) { delete static_cast<Block*>(block); }

c10::DataPtr data_of(c10::Storage host, DeviceIndex index) {
  void* data = host.mutable_data();
  return {data, new Block{std::move(host)}, &release, Device(KIND, index)};
}

const c10::Storage& host_of(const at::Tensor& t) {
  const auto& data = t.storage().data_ptr();
  TORCH_CHECK(data.get_deleter() == &release, "this storage was not made by the pretended device");
  return static_cast<Block*>(data.get_context())->host;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Storage host(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true);
    return data_of(std::move(host), current);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

struct PinnedAllocator final : c10::Allocator {
  static std::unordered_set<const void*>& all() {
    static auto* found = new std::unordered_set<const void*>();
    return *found;
  }
  static void unpin(void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      all().erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    all().insert(data);
    return {data, data, &unpin, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool pinned(const void* storage) {
  std::lock_guard<std::mutex> lock(mutex);
  return PinnedAllocator::all().count(storage) != 0;
}

// ---- devices, streams, events, random numbers ---------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device to) const override {
    Device before(KIND, current);
    current = to.index();
    return before;
  }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device to) const override { current = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  // One stream, in which everything is done at once.
  c10::Stream getStream(Device on) const override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream getDefaultStream(Device on) const override { return getStream(on); }
  c10::Stream getStreamFromGlobalPool(Device on, bool) const override { return getStream(on); }
  c10::Stream getNewStream(Device on, int) const override { return getStream(on); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool isStreamCapturing(const c10::Stream&) const override { return rules.capturing; }
  bool queryStream(const c10::Stream&) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return uploads.empty();
  }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("synchronize"); }
  // An event has no memory: waiting for one waits for everything.
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = this_event(); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return queryStream(getStream({KIND, current})); }
  void synchronizeEvent(void*) const override { wait("synchronize"); }

 private:
  static void* this_event() {
    static int one;
    return &one;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator host;
  DeviceGenerator(DeviceIndex index, at::Generator made)
      : c10::GeneratorImpl(Device(KIND, index), DispatchKeySet(DispatchKey::PrivateUse1)), host(std::move(made)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  void set_state(const TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }
};

at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index, at::detail::createCPUGenerator());
}
const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = new std::array<at::Generator, COUNT>{new_generator(0), new_generator(1)};
  return (*all).at(index < 0 ? current : index);
}
at::Generator host_generator(const at::Generator& of) {
  TORCH_CHECK(of.device().type() == KIND, "Expected a 'pretend' device type for generator but found '", of.device().str(), "'");
  return static_cast<DeviceGenerator*>(of.unsafeGetGeneratorImpl())->host;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return index < 0 ? current : exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index < 0 ? current : index); }
  Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  bool isPinnedPtr(const void* data) const override { return pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// ---- operations ---------------------------------------------------------------------------------

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

void check_float64(c10::ScalarType type) {
  TORCH_CHECK_TYPE(!rules.late || (type != at::kDouble && type != at::kComplexDouble),
                   "Cannot convert a tensor to float64 on this device: it has no float64, as MPS has none");
}

at::Tensor device_tensor(const c10::Storage& storage, DispatchKeySet keys, const at::Tensor& like, bool view) {
  at::Tensor made;
  if (view) {  // with the keys of its base: an inference tensor's view is one
    made = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(storage), keys, like.dtype());
  } else {
    made = at::detail::make_tensor<TensorImpl>(c10::Storage(storage), keys, like.dtype());
  }
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The tensors of one operation, on both sides.
class Call {
 public:
  at::Tensor to_host(const at::Tensor& t) {
    const auto& host = host_of(t);
    bases_.emplace(host.unsafeGetStorageImpl(), t);
    auto view = host_tensor(host, t.dtype(), t.sizes(), t.strides(), t.storage_offset());
    given_.emplace_back(view, t);
    return view;
  }

  at::Tensor to_device(const at::Tensor& host, DeviceIndex index) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    check_float64(host.scalar_type());
    for (auto& [view, own] : given_)
      if (view.is_same(host)) return own;  // written in place
    auto* storage = host.storage().unsafeGetStorageImpl();
    if (auto base = bases_.find(storage); base != bases_.end())
      return device_tensor(base->second.storage(), base->second.key_set(), host, true);
    auto [made, fresh] = made_.try_emplace(storage);
    if (fresh) {
      auto data = data_of(host.storage(), index);
      made->second = c10::Storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), std::move(data), &allocator, true);
    }
    return device_tensor(made->second, DispatchKeySet(DispatchKey::PrivateUse1), host, false);
  }

  // Let the device's tensors follow where the operation resized its arguments.
  void settle() {
    for (auto& [view, own] : given_) {
      auto* host = view.storage().unsafeGetStorageImpl();
      auto* storage = own.storage().unsafeGetStorageImpl();
      if (storage->data() != host->data() || storage->nbytes() != host->nbytes()) {
        storage->set_data_ptr_noswap(data_of(view.storage(), own.device().index()));
        storage->set_nbytes(host->nbytes());
      }
      if (view.sizes() != own.sizes() || view.strides() != own.strides())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> given_;
  std::unordered_map<StorageImpl*, at::Tensor> bases_;
  std::unordered_map<StorageImpl*, c10::Storage> made_;
};

// Operations whose result, or its size, the host has to read.
const std::unordered_set<std::string> READ_BY_HOST{
    "aten::_local_scalar_dense", "aten::_unique", "aten::_unique2", "aten::bincount", "aten::equal", "aten::is_nonzero",
    "aten::masked_select", "aten::nonzero", "aten::nonzero_static", "aten::repeat_interleave.Tensor", "aten::unique_consecutive",
    "aten::unique_dim"};
// Operations that take a list of indices, which may lie on the host and may be masks.
const std::unordered_set<std::string> INDEXED{
    "aten::_index_put_impl_", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::index.Tensor",
    "aten::index.Tensor_out", "aten::index_put", "aten::index_put_"};

bool launches(const std::string& name, const c10::FunctionSchema& schema) {
  for (const char* quiet : {"aten::empty", "aten::resize", "aten::set_", "aten::_local_scalar_dense", "aten::_reshape_alias",
                            "aten::_unsafe_view", "aten::new_empty"})
    if (name.rfind(quiet, 0) == 0) return false;
  const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  return alias == nullptr || alias->isWrite();  // else it gives a view
}

// Of an operation over lists: one, where the lists are alike and dense; else one for each tensor.
int64_t launches_of_lists(const std::vector<std::vector<at::Tensor>>& lists) {
  bool alike = true;
  for (const auto& list : lists)
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& first = lists[0][i];
      alike = alike && list[i].is_non_overlapping_and_dense() && list[i].strides() == first.strides() && list[i].sizes() == first.sizes();
    }
  return alike ? 1 : static_cast<int64_t>(lists[0].size());
}

void operate(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(BELOW_AUTOGRAD);
  const auto& schema = op.schema();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const bool indexed = INDEXED.count(name) != 0;
  const auto arguments = schema.arguments().size(), first = stack->size() - schema.arguments().size();
  check_uploads();
  if (READ_BY_HOST.count(name) != 0) wait(name == "aten::_local_scalar_dense" ? "copy to the host" : (name.c_str() + 6));

  Call call;
  DeviceIndex index = -1;
  std::string stranger;  // an argument on the host that is no single number
  std::vector<std::vector<at::Tensor>> lists;
  auto enter = [&](const at::Tensor& t, const c10::Argument& argument, bool is_index) -> at::Tensor {
    if (!t.defined()) return t;
    if (on_device(t)) {
      TORCH_CHECK(index < 0 || index == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, pretend:",
                  int(index), " and ", t.device().str(), "! (argument ", argument.name(), " of ", name, ")");
      index = t.device().index();
      if (is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) wait("index by a mask");
      return call.to_host(t);
    }
    TORCH_CHECK(t.device().is_cpu(), "Expected all tensors to be on the same device, but found pretend and ", t.device().str(), " in ", name);
    if (is_index) wait("index from the host");
    else if (t.dim() > 0) stranger = argument.name();
    return t;
  };
  for (size_t i = 0; i < arguments; ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor()) {
      value = enter(value.toTensor(), argument, false);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& t : tensors) t = enter(t, argument, false);
      lists.push_back(tensors);
      value = c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(tensors));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> entered;
      for (std::optional<at::Tensor> t : value.toOptionalTensorList()) {
        if (t.has_value()) t = enter(*t, argument, indexed && argument.name() == "indices");
        entered.push_back(t);
      }
      value = entered;
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else if (value.isDevice()) {
      if (index < 0) index = value.toDevice().has_index() ? value.toDevice().index() : current;
      value = Device(c10::DeviceType::CPU);
    }
  }
  if (index < 0) index = current;
  TORCH_CHECK(stranger.empty(), "Expected all tensors to be on the same device, but found at least two devices, pretend:", int(index),
              " and cpu! (argument ", stranger, " of ", name, ")");
  for (size_t i = 0; i < arguments; ++i)
    if (schema.arguments()[i].name() == "generator" && (*stack)[first + i].isNone()) (*stack)[first + i] = host_generator(default_generator(index));
  if (name == "aten::histc")  // CUDA counts whole numbers, too
    if (auto t = (*stack)[first].toTensor(); at::isIntegralType(t.scalar_type(), false)) (*stack)[first] = t.to(at::kFloat);

  if (rules.counting && launches(name, schema))
    count(schema.name(), name.rfind("aten::_foreach_", 0) == 0 && !lists.empty() ? launches_of_lists(lists) : 1);
  op.callBoxed(stack);
  call.settle();
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor(), index);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& t : tensors) t = call.to_device(t, index);
      value = c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(tensors));
    }
  }
}

// Attention that is to be differentiated is made of smaller operations.
void attend(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  static const auto in_parts = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_dot_product_attention_math", "");
  const auto first = stack->size() - op.schema().arguments().size();  // query, key, value, mask, dropout, causal, scale, groups
  bool differentiated = false;
  for (auto i = first; i < first + 3; ++i) differentiated = differentiated || (*stack)[i].toTensor().requires_grad();
  if (!differentiated || !c10::GradMode::is_enabled()) {
    c10::impl::ExcludeDispatchKeyGuard below(BELOW_AUTOGRAD);
    op.callBoxed(stack);
    return;
  }
  if (auto& mask = (*stack)[first + 3]; mask.isTensor() && mask.toTensor().scalar_type() == at::kBool) {
    auto added = (*stack)[first].toTensor().new_zeros(mask.toTensor().sizes());
    mask = added.masked_fill(mask.toTensor().logical_not(), -std::numeric_limits<double>::infinity());
  }
  stack->insert(stack->begin() + static_cast<int64_t>(first) + 6, c10::IValue());  // no dropout mask
  in_parts.callBoxed(stack);
  stack->pop_back();  // the weights
}

// In a lower precision, as the CPU computes products where autocast is on.
void autocast(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(DispatchKey::AutocastPrivateUse1);
  const auto dtype = at::autocast::get_autocast_dtype(KIND);
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor() && on_device(value.toTensor()) && value.toTensor().is_floating_point()) value = value.toTensor().to(dtype);
  }
  op.callBoxed(stack);
}

at::Tensor host_side(Call& call, const at::Tensor& t) { return on_device(t) ? call.to_host(t) : t; }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  check_uploads();
  check_float64(on_device(to) ? to.scalar_type() : at::kFloat);
  Call call;
  auto source = host_side(call, from), target = host_side(call, to);
  if (on_device(from) && on_device(to)) {
    count(from.device() == to.device() ? "copy on the device" : "copy between devices");
    target.copy_(source);
    return to;
  }
  const bool free = non_blocking && pinned((on_device(to) ? from : to).storage().data());
  TORCH_CHECK(!rules.capturing || free, "operation not permitted when stream is capturing: copy from or to memory that is not pinned");
  if (on_device(to)) {
    count("copy from the host");
    if (!non_blocking) wait("copy from the host");
    target.copy_(source);
    if (non_blocking && rules.late) {
      std::unique_lock<std::mutex> lock(mutex);
      uploads.push_back({uploads_ever++, from.storage().getWeakStorageImpl(), free, from.sizes().vec(), from.strides().vec(),
                         from.storage_offset(), from.dtype(), from.clone()});
      lock.unlock();
      if (on_late.load() != nullptr) on_late.load()("copy from the host");
    }
    return to;
  }
  count("copy to the host");
  TORCH_CHECK(!non_blocking || !rules.late, "a copy to the host must wait: until then its memory holds garbage");
  wait("copy to the host");
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> dense(sizes.size(), 1);
  for (auto i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i) dense[i] = dense[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  impl->set_sizes_and_strides(sizes, strides.empty() ? at::IntArrayRef(dense) : strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const auto numbers = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numbers}, {1});
}

// A list that lies on several devices, or partly on the host, is copied one by one.
void foreach_copy(at::TensorList to, at::TensorList from, bool non_blocking) {
  std::vector<std::vector<at::Tensor>> lists{to.vec(), from.vec()};
  bool together = true;
  for (const auto& list : lists)
    for (const auto& t : list) together = together && on_device(t) && t.device() == to[0].device();
  if (!together) {
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
    return;
  }
  check_uploads();
  count("aten::_foreach_copy_", launches_of_lists(lists));
  for (size_t i = 0; i < to.size(); ++i) {
    Call call;
    call.to_host(to[i]).copy_(call.to_host(from[i]));
  }
}

at::Tensor rng_state(int64_t device) {
  const auto& generator = default_generator(static_cast<DeviceIndex>(device));
  return at::Tensor(host_generator(generator).unsafeGetGeneratorImpl()->get_state());
}

void set_rng_state(int64_t device, const at::Tensor& state) {
  host_generator(default_generator(static_cast<DeviceIndex>(device))).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&operate>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_foreach_copy_", &foreach_copy);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  // Made of others elsewhere; here the CPU's own kernel computes them whole, so that bits are equal.
  for (const char* whole : {"scaled_dot_product_attention", "convolution"}) m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&operate>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&attend>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* low : {"addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "scaled_dot_product_attention"})
    m.impl(low, torch::CppFunction::makeFromBoxedFunction<&autocast>());
}

TORCH_LIBRARY(pretended, m) {
  m.def("rng_state(int device) -> Tensor", &rng_state);
  m.def("set_rng_state(int device, Tensor state) -> ()", &set_rng_state);
}

// What pretended.py calls by ctypes.
extern "C" {
void pretended_rule(const char* name, bool on) {
  std::lock_guard<std::mutex> lock(mutex);
  const std::string rule(name);
  if (rule == "counting") rules.counting = on;
  if (rule == "capturing") rules.capturing = on;
  if (rule == "late") {
    rules.late = on;
    uploads.clear();
    violations.clear();
    uploads_ever = 0;
  }
}
void pretended_listen(Told waits, Told late) {
  on_wait = waits;
  on_late = late;
}
// Lines of "count name", of kernels since the last call; lines of violations since `late` was set.
const char* pretended_kernels() {
  std::lock_guard<std::mutex> lock(mutex);
  static std::string text;
  text.clear();
  for (const auto& [name, times] : kernels) text += std::to_string(times) + " " + name + "\n";
  kernels.clear();
  return text.c_str();
}
const char* pretended_violations() {
  std::lock_guard<std::mutex> lock(mutex);
  static std::string text;
  text.clear();
  for (const auto& one : violations) text += one + "\n";
  return text.c_str();
}
int pretended_device() { return current; }
void pretended_set_device(int index) { current = static_cast<DeviceIndex>(index); }
void pretended_seed(int index, uint64_t seed) {
  auto generator = default_generator(static_cast<DeviceIndex>(index));
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}
}
