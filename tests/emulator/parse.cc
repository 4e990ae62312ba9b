// From PTX's text to instructions.
#include <algorithm>
#include <cctype>
#include <cstring>

#include "emulator.h"

namespace emulator {
namespace {

std::string Trim(std::string_view s) {
  while (!s.empty() && std::isspace(static_cast<unsigned char>(s.front()))) s.remove_prefix(1);
  while (!s.empty() && std::isspace(static_cast<unsigned char>(s.back()))) s.remove_suffix(1);
  return std::string(s);
}

std::string WithoutComments(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (text.compare(i, 2, "/*") == 0) {
      i = std::min(text.find("*/", i), text.size() - 2) + 2;
    } else {
      out += text[i++];
    }
  }
  return out;
}

// At commas outside of brackets.
std::vector<std::string> SplitOperands(std::string_view text) {
  std::vector<std::string> out;
  int depth = 0;
  std::string word;
  for (char c : text) {
    depth += c == '{' || c == '[' || c == '(';
    depth -= c == '}' || c == ']' || c == ')';
    if (c == ',' && depth == 0) {
      out.push_back(Trim(word));
      word.clear();
    } else {
      word += c;
    }
  }
  if (!Trim(word).empty()) out.push_back(Trim(word));
  return out;
}

int64_t AlignUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ".param .align 8 .b8 name[72]", ".shared .b64 name", ".extern .shared .align 128 .b8 name[]".
struct Declaration {
  std::string name;
  int64_t align = 1, bytes = 0;
  bool sized = true;
  std::string space;
};

Declaration ParseDeclaration(const std::string& text) {
  Declaration d;
  std::string head = text.substr(0, text.find('='));
  std::string word;
  std::vector<std::string> words;
  for (char c : head + " ") {
    if (std::isspace(static_cast<unsigned char>(c))) {
      if (!word.empty()) words.push_back(word);
      word.clear();
    } else {
      word += c;
    }
  }
  int64_t each = 1;
  bool aligned = false;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == ".align") {
      d.align = std::stoll(words[++i]);
      aligned = true;
    } else if (words[i] == ".shared" || words[i] == ".local" || words[i] == ".param" || words[i] == ".global" ||
               words[i] == ".const") {
      d.space = words[i].substr(1);
    } else if (words[i][0] == '.') {
      if (const Scalar t = ScalarOf(std::string_view(words[i]).substr(1)); t != Scalar::kNone) each = Bytes(t);
    } else {
      d.name += words[i];
    }
  }
  if (!aligned) d.align = each;
  int64_t count = 1;
  if (const size_t bracket = d.name.find('['); bracket != std::string::npos) {
    for (size_t at = bracket; at != std::string::npos; at = d.name.find('[', at + 1)) {
      const std::string inside = d.name.substr(at + 1, d.name.find(']', at) - at - 1);
      d.sized = !inside.empty();
      count *= d.sized ? std::stoll(inside) : 0;
    }
    d.name.resize(bracket);
  }
  d.bytes = count * each;
  return d;
}

bool IsNumber(const std::string& s) {
  return !s.empty() && (std::isdigit(static_cast<unsigned char>(s[0])) || (s[0] == '-' && s.size() > 1));
}

uint64_t Number(std::string s) {
  const bool negative = s[0] == '-';
  if (negative) s.erase(0, 1);
  uint64_t value;
  if (s.size() > 2 && s[0] == '0' && (s[1] == 'f' || s[1] == 'F' || s[1] == 'd' || s[1] == 'D')) {
    value = std::stoull(s.substr(2), nullptr, 16);
  } else {
    value = std::stoull(s, nullptr, 0);
  }
  return negative ? 0 - value : value;
}

}  // namespace

Scalar ScalarOf(std::string_view word) {
  static const std::map<std::string_view, Scalar> kTypes = {
      {"pred", Scalar::kPred}, {"b8", Scalar::kB8},     {"b16", Scalar::kB16},     {"b32", Scalar::kB32},
      {"b64", Scalar::kB64},   {"u8", Scalar::kU8},     {"u16", Scalar::kU16},     {"u32", Scalar::kU32},
      {"u64", Scalar::kU64},   {"s8", Scalar::kS8},     {"s16", Scalar::kS16},     {"s32", Scalar::kS32},
      {"s64", Scalar::kS64},   {"f16", Scalar::kF16},   {"bf16", Scalar::kBF16},   {"f32", Scalar::kF32},
      {"f64", Scalar::kF64},   {"b128", Scalar::kB128}, {"f16x2", Scalar::kF16x2}, {"bf16x2", Scalar::kBF16x2}};
  const auto found = kTypes.find(word);
  return found == kTypes.end() ? Scalar::kNone : found->second;
}

int Bytes(Scalar type) {
  switch (type) {
    case Scalar::kPred:
    case Scalar::kB8:
    case Scalar::kU8:
    case Scalar::kS8:
      return 1;
    case Scalar::kB16:
    case Scalar::kU16:
    case Scalar::kS16:
    case Scalar::kF16:
    case Scalar::kBF16:
      return 2;
    case Scalar::kB64:
    case Scalar::kU64:
    case Scalar::kS64:
    case Scalar::kF64:
      return 8;
    case Scalar::kB128:
      return 16;
    default:
      return 4;
  }
}

Module::Module(std::string text) : text_(WithoutComments(text)) {
  // What is outside of functions: statements, and bodies, which are left for later.
  size_t begin = 0;
  for (size_t i = 0; i < text_.size(); ++i) {
    if (text_[i] == ';') {
      std::string statement = Trim(std::string_view(text_).substr(begin, i - begin));
      if (statement.find(".address_size") != std::string::npos)  // the file's head, which ends without a semicolon
        statement = Trim(statement.substr(statement.find("64", statement.find(".address_size")) + 2));
      // Declarations of functions have no body.
      if (statement.find(".func") == std::string::npos && statement.find(".entry") == std::string::npos &&
          (statement.find(".shared") != std::string::npos || statement.find(".global") != std::string::npos ||
           statement.find(".const") != std::string::npos))
        variables_.push_back(statement);
      begin = i + 1;
    } else if (text_[i] == '{') {
      size_t end = i + 1;
      for (int depth = 1; depth > 0; ++end) depth += (text_[end] == '{') - (text_[end] == '}');
      const std::string head = text_.substr(begin, i - begin);
      if (head.find(".entry") != std::string::npos || head.find(".func") != std::string::npos) {
        const bool entry = head.find(".entry") != std::string::npos;
        size_t at = entry ? head.find(".entry") + 6 : head.find(".func") + 5;
        while (std::isspace(static_cast<unsigned char>(head[at]))) ++at;
        if (head[at] == '(') at = head.find(')', at) + 1;  // what it returns
        while (std::isspace(static_cast<unsigned char>(head[at]))) ++at;
        size_t stop = at;
        while (stop < head.size() && head[stop] != '(' && !std::isspace(static_cast<unsigned char>(head[stop]))) ++stop;
        functions_[head.substr(at, stop - at)] = {begin, end};
        begin = end;
        i = end - 1;
      } else {
        i = end - 1;  // an initialiser
      }
    }
  }
}

// Decodes one function, and what it calls in its place.
class Decoder : public Names {
 public:
  Decoder(Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {
    kernel_.shared_bytes = kSharedBase;
    for (const std::string& v : module.variables_) {
      const Declaration d = ParseDeclaration(v);
      if (d.space == "shared") {
        if (d.sized) {
          shared_[d.name] = Reserve(&kernel_.shared_bytes, d);
        } else {
          dynamic_.push_back(d);
        }
      } else {
        std::vector<uint8_t>& bytes = module.globals_[d.name];
        if (bytes.empty()) bytes = Initial(d, v);
        globals_[d.name] = reinterpret_cast<uint64_t>(bytes.data());
      }
    }
  }

  void Decode(const std::string& name) {
    std::string head, body;
    Text(name, &head, &body);
    const size_t open = head.find('(');
    std::map<std::string, int64_t> parameters;
    if (open != std::string::npos) {
      for (const std::string& p :
           SplitOperands(std::string_view(head).substr(open + 1, head.find(')', open) - open - 1))) {
        const Declaration d = ParseDeclaration(p);
        const int64_t at = Reserve(&kernel_.parameter_bytes, d);
        kernel_.parameters.push_back({at, d.bytes});
        parameters[d.name] = at;
      }
    }
    if (const size_t at = head.find(".maxntid"); at != std::string::npos) {
      kernel_.max_threads = 1;
      for (const std::string& extent :
           SplitOperands(std::string_view(head).substr(at + 8, head.find('\n', at) - at - 8)))
        kernel_.max_threads *= std::stoi(extent);
    }
    scopes_.emplace_back();
    for (const auto& [parameter, at] : parameters) {
      const int r = NewRegister();
      kernel_.parameter_addresses.push_back({r, at});
      scopes_.back().addresses[parameter] = r;
    }
    Body(body);
    scopes_.pop_back();
    kernel_.code.push_back(Plain("exit"));
    // Dynamic shared memory comes last; all names of it are one place.
    int64_t align = 16;
    for (const Declaration& d : dynamic_) align = std::max(align, d.align);
    kernel_.shared_bytes = AlignUp(kernel_.shared_bytes, align);
    for (const int r : dynamic_registers_)
      kernel_.constants.push_back({r, static_cast<uint64_t>(kernel_.shared_bytes)});
    for (const auto& [at, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) throw Error("no label " + label);
      kernel_.code[at].immediate = found->second;
    }
    for (const auto& [table, names] : tables_) {
      kernel_.tables.resize(std::max<size_t>(kernel_.tables.size(), table + 1));
      for (const std::string& n : names) kernel_.tables[table].push_back(labels_.at(n));
    }
  }

  int Register(const std::string& operand) override {
    if (operand == "_") return NewRegister();
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto r = scope->registers.find(operand); r != scope->registers.end()) return r->second;
      if (const auto r = scope->addresses.find(operand); r != scope->addresses.end()) return r->second;
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
    for (const Declaration& d : dynamic_) {
      if (d.name == operand) {
        dynamic_registers_.push_back(NewRegister());
        return dynamic_registers_.back();
      }
    }
    throw Error("unknown operand " + operand);
  }

 private:
  struct Scope {
    std::map<std::string, int> registers, addresses;
    std::string prefix;     // of its labels
    bool function = false;  // nothing further out is visible
  };

  static int64_t Reserve(int64_t* bytes, const Declaration& d) {
    const int64_t at = AlignUp(*bytes, d.align);
    *bytes = at + d.bytes;
    return at;
  }

  static std::vector<uint8_t> Initial(const Declaration& d, const std::string& text) {
    std::vector<uint8_t> bytes(std::max<int64_t>(d.bytes, 16));
    if (const size_t at = text.find('='); at != std::string::npos) {
      std::string values = text.substr(at + 1);
      values.erase(std::remove_if(values.begin(), values.end(), [](char c) { return c == '{' || c == '}'; }),
                   values.end());
      const std::vector<std::string> list = SplitOperands(values);
      const int64_t each = d.bytes / std::max<int64_t>(1, static_cast<int64_t>(list.size()));
      const int64_t size = each >= 8 ? 8 : each >= 4 ? 4 : each >= 2 ? 2 : 1;
      for (size_t i = 0; i < list.size(); ++i) {
        const uint64_t value = Number(list[i]);
        std::memcpy(bytes.data() + i * size, &value, size);
      }
    }
    return bytes;
  }

  void Text(const std::string& name, std::string* head, std::string* body) const {
    const auto found = module_.functions_.find(name);
    if (found == module_.functions_.end()) throw Error("no function " + name);
    const std::string all = module_.text_.substr(found->second.first, found->second.second - found->second.first);
    const size_t brace = all.find('{');
    *head = all.substr(0, brace);
    *body = all.substr(brace + 1, all.size() - brace - 2);
    *head = head->substr(head->find(name));
  }

  int NewRegister() { return kernel_.registers++; }

  int Constant(uint64_t value) {
    const auto [found, fresh] = constants_.try_emplace(value, -1);
    if (fresh) kernel_.constants.push_back({found->second = NewRegister(), value});
    return found->second;
  }

  static Instruction Plain(const std::string& opcode) {
    Instruction i;
    i.text = opcode;
    struct None : Names {
      int Register(const std::string&) override { return 0; }
    } none;
    Bind(i, opcode, {}, none);
    return i;
  }

  std::string Label(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const std::string full = scope->prefix + name;
      if (known_labels_.count(full)) return full;
      if (scope->function) break;
    }
    return scopes_.back().prefix + name;
  }

  // Statements one after the other; braces at the beginning of one are scopes.
  struct Statement {
    enum Kind { kOpen, kClose, kLabel, kCode } kind;
    std::string text;
  };
  static std::vector<Statement> Statements(const std::string& body) {
    std::vector<Statement> out;
    std::string word;
    int depth = 0;
    for (char c : body) {
      const bool fresh = word.find_first_not_of(" \t\n\r") == std::string::npos;
      if (fresh && (c == '{' || c == '}')) {
        out.push_back({c == '{' ? Statement::kOpen : Statement::kClose, ""});
        word.clear();
      } else if (c == ';') {
        if (!fresh) out.push_back({Statement::kCode, Trim(word)});
        word.clear();
      } else if (c == ':' && depth == 0 && !fresh && Trim(word).find_first_of(" \t\n.") == std::string::npos) {
        out.push_back({Statement::kLabel, Trim(word)});
        word.clear();
      } else {
        word += c;
      }
    }
    return out;
  }

  void Body(const std::string& body) {
    const std::vector<Statement> statements = Statements(body);
    const size_t outer = scopes_.size();
    scopes_.back().function = true;
    scopes_.back().prefix = std::to_string(unique_++) + ":";
    // Labels may be used before they come, and belong to their scope.
    {
      std::vector<std::string> prefixes = {scopes_.back().prefix};
      int next = 0;
      for (const Statement& s : statements) {
        if (s.kind == Statement::kOpen) prefixes.push_back(prefixes[0] + std::to_string(next++) + ":");
        if (s.kind == Statement::kClose) prefixes.pop_back();
        if (s.kind == Statement::kLabel) known_labels_.insert({prefixes.back() + s.text, true});
      }
    }
    int next = 0;
    for (const Statement& s : statements) {
      switch (s.kind) {
        case Statement::kOpen:
          scopes_.emplace_back();
          scopes_.back().prefix = scopes_[outer - 1].prefix + std::to_string(next++) + ":";
          break;
        case Statement::kClose:
          scopes_.pop_back();
          break;
        case Statement::kLabel:
          last_label_ = scopes_.back().prefix + s.text;
          labels_[last_label_] = static_cast<int>(kernel_.code.size());
          break;
        case Statement::kCode:
          try {
            Code(s.text);
          } catch (const std::exception& e) {
            throw Error(std::string(e.what()) + ": " + s.text);
          }
      }
    }
  }

  void Code(const std::string& text) {
    if (text[0] == '.') return Directive(text);
    Instruction i;
    i.text = text;
    std::string rest = text;
    if (rest[0] == '@') {
      size_t at = 1;
      i.negated = rest[1] == '!';
      at += i.negated;
      const size_t end = rest.find_first_of(" \t\n", at);
      i.guard = Register(rest.substr(at, end - at));
      rest = Trim(std::string_view(rest).substr(end));
    }
    const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
    const std::string opcode = rest.substr(0, end);
    const std::vector<std::string> operands = SplitOperands(std::string_view(rest).substr(end));
    if (opcode.compare(0, 4, "call") == 0) return Call(operands);
    if (opcode == "ret" && !returns_.empty()) {  // to behind the call
      Bind(i, "bra", {}, *this);
      branches_.push_back({kernel_.code.size(), returns_.back()});
    } else if (opcode.compare(0, 3, "bra") == 0 && opcode.compare(0, 4, "brar") != 0) {
      Bind(i, "bra", {}, *this);
      branches_.push_back({kernel_.code.size(), Label(operands[0])});
    } else if (opcode.compare(0, 3, "brx") == 0) {
      Bind(i, "brx", {operands[0]}, *this);
      i.immediate = table_names_.at(Label(operands[1]));
    } else {
      Bind(i, opcode, operands, *this);
    }
    kernel_.code.push_back(std::move(i));
  }

  void Directive(const std::string& text) {
    if (text.compare(0, 4, ".reg") == 0) {
      std::string list = Trim(std::string_view(text).substr(4));
      list = list.substr(list.find_first_of(" \t"));
      for (const std::string& name : SplitOperands(list)) {
        const size_t bracket = name.find('<');
        if (bracket == std::string::npos) {
          scopes_.back().registers[name] = NewRegister();
        } else {
          const int count = std::stoi(name.substr(bracket + 1));
          for (int k = 0; k < count; ++k)
            scopes_.back().registers[name.substr(0, bracket) + std::to_string(k)] = NewRegister();
        }
      }
    } else if (text.compare(0, 14, ".branchtargets") == 0) {
      const int table = static_cast<int>(tables_.size());
      table_names_[last_label_] = table;
      for (const std::string& name : SplitOperands(std::string_view(text).substr(14)))
        tables_[table].push_back(Label(name));
    } else if (text.compare(0, 7, ".shared") == 0) {
      const Declaration d = ParseDeclaration(text);
      const auto [found, fresh] = shared_.try_emplace(d.name, 0);
      if (fresh) found->second = Reserve(&kernel_.shared_bytes, d);
    } else if (text.compare(0, 6, ".local") == 0 || text.compare(0, 6, ".param") == 0) {
      const Declaration d = ParseDeclaration(text);  // a call's parameters are local memory
      const int r = NewRegister();
      kernel_.locals.push_back({r, Reserve(&kernel_.local_bytes, d)});
      scopes_.back().addresses[d.name] = r;
    } else if (text.compare(0, 7, ".pragma") != 0 && text.compare(0, 4, ".loc") != 0) {
      throw Error("unknown directive");
    }
  }

  // (results), function, (arguments)
  void Call(const std::vector<std::string>& operands) {
    size_t k = 0;
    const auto list = [](const std::string& s) { return SplitOperands(std::string_view(s).substr(1, s.size() - 2)); };
    std::vector<std::string> results, arguments;
    if (operands[k][0] == '(') results = list(operands[k++]);
    const std::string function = operands[k++];
    if (k < operands.size()) arguments = list(operands[k]);
    std::string head, body;
    Text(function, &head, &body);
    // Its parameters' names are other names for the caller's memory.
    Scope scope;
    const size_t open = head.find('(');
    if (open != std::string::npos) {
      const std::vector<std::string> names =
          SplitOperands(std::string_view(head).substr(open + 1, head.find(')', open) - open - 1));
      for (size_t n = 0; n < names.size(); ++n)
        scope.addresses[ParseDeclaration(names[n]).name] = Register(arguments.at(n));
    }
    if (!results.empty()) {
      const auto [begin, end] = module_.functions_.at(function);
      const std::string all = module_.text_.substr(begin, end - begin);
      const size_t paren = all.find('(');
      scope.addresses[ParseDeclaration(all.substr(paren + 1, all.find(')') - paren - 1)).name] = Register(results[0]);
    }
    scopes_.push_back(std::move(scope));
    returns_.push_back("return:" + std::to_string(unique_++));
    if (returns_.size() > 16) throw Error("calls itself");
    Body(body);
    labels_[returns_.back()] = static_cast<int>(kernel_.code.size());
    returns_.pop_back();
    scopes_.pop_back();
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
  std::map<std::string, bool> known_labels_;
  std::map<std::string, int> labels_, table_names_;
  std::map<int, std::vector<std::string>> tables_;
  std::vector<std::pair<size_t, std::string>> branches_;
  std::vector<std::string> returns_;
  std::string last_label_;
  int unique_ = 0;
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
