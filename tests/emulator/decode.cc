// From PTX's text to instructions.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "emulator.h"
#include "text.h"

namespace emulator {
namespace {

int64_t AlignUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// ".param .align 8 .b8 name[72]", ".shared .b64 name", ".extern .shared .align 128 .b8 name[]".
struct Declaration {
  std::string name, space;
  int64_t align = 0, bytes = 1;
  bool sized = true;

  explicit Declaration(std::string_view text) {
    std::istringstream words{std::string(text.substr(0, text.find('=')))};
    for (std::string word; words >> word;) {
      if (word == ".align") {
        words >> align;
      } else if (word == ".shared" || word == ".local" || word == ".param" || word == ".global" || word == ".const") {
        space = word.substr(1);
      } else if (word[0] != '.') {
        name += word;
      } else if (const Scalar t = ScalarOf(std::string_view(word).substr(1)); t != Scalar::kNone) {
        bytes = Bytes(t);
      }
    }
    if (align == 0) align = bytes;
    const size_t bracket = std::min(name.find('['), name.size());
    for (const std::string& extent : Split(name.substr(bracket), ']')) {  // "[3", "[" for whatever it may be
      sized = extent.size() > 1;
      bytes *= sized ? std::stoll(extent.substr(1)) : 0;
    }
    name.resize(bracket);
  }

  int64_t Reserve(int64_t* used) const {
    const int64_t at = AlignUp(*used, align);
    *used = at + bytes;
    return at;
  }
};

bool IsNumber(const std::string& s) { return !s.empty() && (IsDigit(s[0]) || (s[0] == '-' && s.size() > 1)); }

uint64_t Number(const std::string& s) {
  if (s[0] == '-') return 0 - Number(s.substr(1));
  const bool is_float = s.size() > 2 && s[0] == '0' && std::strchr("fFdD", s[1]);
  return is_float ? std::stoull(s.substr(2), nullptr, 16) : std::stoull(s, nullptr, 0);
}

std::vector<uint8_t> Initial(const Declaration& d, const std::string& text) {
  std::vector<uint8_t> bytes(std::max<int64_t>(d.bytes, 16));
  if (const size_t at = text.find('='); at != text.npos) {
    std::string list = text.substr(at + 1);
    std::erase_if(list, [](char c) { return c == '{' || c == '}'; });
    const std::vector<std::string> values = Split(list);
    const int64_t each = d.bytes / std::max<int64_t>(1, values.size());
    const int64_t size = each >= 8 ? 8 : each >= 4 ? 4 : each >= 2 ? 2 : 1;
    for (size_t k = 0; k < values.size(); ++k) {
      const uint64_t value = Number(values[k]);
      std::memcpy(bytes.data() + k * size, &value, size);
    }
  }
  return bytes;
}

// Statements one after the other; braces at the beginning of one, which are scopes, and labels, with their colon, too.
std::vector<std::string> Statements(std::string_view body) {
  std::vector<std::string> out;
  size_t begin = 0;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (!std::strchr("{}:;", c)) continue;
    const std::string text = Trim(body.substr(begin, i - begin));
    const bool scope = text.empty() && (c == '{' || c == '}');
    const bool label = c == ':' && !text.empty() && text.find_first_of(" \t\n.") == text.npos;
    if (c != ';' && !scope && !label) continue;
    if (scope || label)
      out.push_back(text + c);
    else if (!text.empty())
      out.push_back(text);
    begin = i + 1;
  }
  return out;
}

}  // namespace

// Decodes one function, and what it calls in its place.
class Decoder : public Names {
 public:
  Decoder(Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {
    kernel_.shared_bytes = kSharedBase;
    for (const std::string& text : module.variables_) {
      const Declaration d(text);
      if (d.space == "shared" && d.sized) {
        shared_[d.name] = d.Reserve(&kernel_.shared_bytes);
      } else if (d.space == "shared") {
        dynamic_.push_back(d);
      } else if (!d.space.empty()) {
        std::vector<uint8_t>& bytes = module.globals_[d.name];
        if (bytes.empty()) bytes = Initial(d, text);
        globals_[d.name] = reinterpret_cast<uint64_t>(bytes.data());
      }
    }
  }

  void Decode(const std::string& name) {
    const Module::Function& f = Find(name);
    Scope scope{.function = true};
    for (const std::string& text : Split(f.parameters)) {
      const Declaration d(text);
      const int64_t at = d.Reserve(&kernel_.parameter_bytes);
      kernel_.parameters.push_back({at, d.bytes});
      kernel_.parameter_addresses.push_back({scope.names[d.name] = NewRegister(), at});
    }
    if (const size_t at = f.attributes.find(".maxntid"); at != f.attributes.npos) {
      kernel_.max_threads = 1;
      const std::string_view extents = f.attributes.substr(at + 8);
      for (const std::string& extent : Split(extents.substr(0, extents.find('\n'))))
        kernel_.max_threads *= std::stoi(extent);
    }
    Body(f.body, std::move(scope));
    Code("exit");
    // Dynamic shared memory comes last; all names of it are one place.
    int64_t align = 16;
    for (const Declaration& d : dynamic_) align = std::max(align, d.align);
    kernel_.shared_bytes = AlignUp(kernel_.shared_bytes, align);
    for (const int r : dynamic_registers_)
      kernel_.constants.push_back({r, static_cast<uint64_t>(kernel_.shared_bytes)});
    for (const auto& [at, target] : branches_) kernel_.code[at].immediate = PlaceOf(target);
    for (const std::vector<Target>& table : tables_) {
      kernel_.tables.emplace_back();
      for (const Target& target : table) kernel_.tables.back().push_back(PlaceOf(target));
    }
  }

  int Register(const std::string& operand) override {
    if (operand == "_") return NewRegister();
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto r = scope->names.find(operand); r != scope->names.end()) return r->second;
      if (scope->function) break;
    }
    if (IsNumber(operand)) return Constant(Number(operand));
    if (operand[0] == '%') {
      const auto [found, fresh] = specials_.try_emplace(operand, -1);
      if (fresh) kernel_.specials.push_back({found->second = NewRegister(), operand});
      return found->second;
    }
    if (const auto at = shared_.find(operand); at != shared_.end()) return Constant(at->second);
    if (const auto at = globals_.find(operand); at != globals_.end()) return Constant(at->second);
    if (std::none_of(dynamic_.begin(), dynamic_.end(), [&](const Declaration& d) { return d.name == operand; }))
      throw Error("unknown operand " + operand);
    return dynamic_registers_.emplace_back(NewRegister());
  }

 private:
  struct Scope {
    int id = 0;
    std::map<std::string, int> names;  // of registers, and of what has its address in one
    bool function = false;             // nothing further out is visible
  };
  // A label, and the scopes in which it may be.
  struct Target {
    std::vector<int> scopes;
    std::string label;
  };

  const Module::Function& Find(const std::string& name) const {
    const auto found = module_.functions_.find(name);
    if (found == module_.functions_.end()) throw Error("no function " + name);
    return found->second;
  }

  int NewRegister() { return kernel_.registers++; }

  int Constant(uint64_t value) {
    const auto [found, fresh] = constants_.try_emplace(value, -1);
    if (fresh) kernel_.constants.push_back({found->second = NewRegister(), value});
    return found->second;
  }

  Target TargetOf(const std::string& label) const {
    Target target{{}, label};
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      target.scopes.push_back(scope->id);
      if (scope->function) break;
    }
    return target;
  }
  int PlaceOf(const Target& target) const {
    for (const int scope : target.scopes)
      if (const auto found = labels_.find({scope, target.label}); found != labels_.end()) return found->second;
    throw Error("no label " + target.label);
  }
  void Mark(const std::string& label, size_t place) { labels_[{scopes_.back().id, label}] = static_cast<int>(place); }

  void Open(Scope scope) {
    scope.id = next_scope_++;
    scopes_.push_back(std::move(scope));
  }

  void Body(std::string_view body, Scope function) {
    Open(std::move(function));
    std::string label;
    for (const std::string& s : Statements(body)) {
      try {
        if (s == "{") {
          Open({});
        } else if (s == "}") {
          scopes_.pop_back();
        } else if (s.back() == ':') {
          label = s.substr(0, s.size() - 1);
          Mark(label, kernel_.code.size());
        } else if (s.starts_with(".branchtargets")) {  // the label before it is that of a table
          Mark(label, tables_.size());
          tables_.emplace_back();
          for (const std::string& name : Split(s.substr(14))) tables_.back().push_back(TargetOf(name));
        } else if (s[0] == '.') {
          Directive(s);
        } else {
          Code(s);
        }
      } catch (const std::exception& e) {
        throw Error(std::string(e.what()) + ": " + s);
      }
    }
    Mark("return", kernel_.code.size());
    scopes_.pop_back();
  }

  void Code(const std::string& text) {
    Instruction i;
    i.text = text;
    std::string rest = text;
    if (rest[0] == '@') {
      i.negated = rest[1] == '!';
      const size_t begin = 1 + i.negated, end = rest.find_first_of(kSpace);
      i.guard = Register(rest.substr(begin, end - begin));
      rest = Trim(rest.substr(end));
    }
    const size_t end = std::min(rest.find_first_of(kSpace), rest.size());
    std::string opcode = rest.substr(0, end);
    const std::vector<std::string> operands = Split(rest.substr(end));
    if (opcode.starts_with("call")) return Call(operands);
    if (opcode == "ret" && calls_ > 0) opcode = "bra";  // to behind the call
    if (opcode.starts_with("bra") || opcode.starts_with("brx"))
      branches_.push_back({kernel_.code.size(), TargetOf(operands.empty() ? "return" : operands.back())});
    Bind(i, opcode, operands, *this);
    kernel_.code.push_back(std::move(i));
  }

  void Directive(const std::string& text) {
    if (text.starts_with(".reg")) {
      const size_t type = text.find('.', 1);
      for (const std::string& name : Split(text.substr(text.find_first_of(kSpace, type)))) {
        const size_t bracket = name.find('<');
        if (bracket == name.npos) {
          scopes_.back().names[name] = NewRegister();
        } else {
          for (int k = 0; k < std::stoi(name.substr(bracket + 1)); ++k)
            scopes_.back().names[name.substr(0, bracket) + std::to_string(k)] = NewRegister();
        }
      }
    } else if (text.starts_with(".shared")) {
      const Declaration d(text);
      const auto [found, fresh] = shared_.try_emplace(d.name, 0);
      if (fresh) found->second = d.Reserve(&kernel_.shared_bytes);
    } else if (text.starts_with(".local") || text.starts_with(".param")) {  // a call's parameters are local memory
      const Declaration d(text);
      const int r = scopes_.back().names[d.name] = NewRegister();
      kernel_.locals.push_back({r, d.Reserve(&kernel_.local_bytes)});
    } else if (!text.starts_with(".pragma") && !text.starts_with(".loc")) {
      throw Error("unknown directive");
    }
  }

  // (results), function, (arguments). Its parameters' names are other names for the caller's memory.
  void Call(const std::vector<std::string>& operands) {
    const bool results = operands[0][0] == '(';
    const Module::Function& f = Find(operands.at(results));
    Scope scope{.function = true};
    const auto pass = [&](std::string_view parameters, std::string_view list) {
      const std::vector<std::string> arguments = Split(list.substr(1, list.size() - 2));
      size_t k = 0;
      for (const std::string& text : Split(parameters))
        scope.names[Declaration(text).name] = Register(arguments.at(k++));
    };
    if (results) pass(f.results, operands[0]);
    if (operands.size() > results + 1u) pass(f.parameters, operands[results + 1]);
    if (++calls_ > 16) throw Error("calls itself");
    Body(f.body, std::move(scope));
    --calls_;
  }

  Module& module_;
  Kernel& kernel_;
  std::vector<Scope> scopes_;
  std::map<uint64_t, int> constants_;
  std::map<std::string, int> specials_;
  std::map<std::string, int64_t> shared_;
  std::map<std::string, uint64_t> globals_;
  std::vector<Declaration> dynamic_;
  std::vector<int> dynamic_registers_;
  std::map<std::pair<int, std::string>, int> labels_;  // by scope; of a table, its index
  std::vector<std::vector<Target>> tables_;
  std::vector<std::pair<size_t, Target>> branches_;
  int next_scope_ = 0, calls_ = 0;
};

const Kernel& Module::Find(const std::string& name) {
  std::unique_ptr<Kernel>& kernel = kernels_[name];
  if (!kernel) {
    auto decoded = std::make_unique<Kernel>();
    decoded->name = name;
    Decoder(*this, *decoded).Decode(name);
    kernel = std::move(decoded);
  }
  return *kernel;
}

}  // namespace emulator
