// From PTX's text to the text of its functions and variables.
#include <algorithm>

#include "emulator.h"
#include "text.h"

namespace emulator {
namespace {

std::string WithoutComments(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text.compare(i, 2, "//") == 0) {
      i = std::min(text.find('\n', i), text.size());
    } else if (text.compare(i, 2, "/*") == 0) {
      i = std::min(text.find("*/", i), text.size() - 2) + 2;
    } else {
      out += text[i++];
    }
  }
  return out;
}

// "(...)" at the beginning of the text, which is taken off; what is between the brackets.
std::string_view TakeList(std::string_view* text) {
  text->remove_prefix(std::min(text->find_first_not_of(kSpace), text->size()));
  if (!text->starts_with('(')) return {};
  const size_t end = text->find(')');
  const std::string_view list = text->substr(1, end - 1);
  text->remove_prefix(end + 1);
  text->remove_prefix(std::min(text->find_first_not_of(kSpace), text->size()));
  return list;
}

}  // namespace

Module::Module(const std::string& text) : text_(WithoutComments(text)) {
  const std::string_view all = text_;
  size_t begin = all.find('\n', all.find(".address_size"));  // the file's head ends without a semicolon
  for (size_t i = begin; i < all.size(); ++i) {
    const std::string_view statement = all.substr(begin, i - begin);
    const size_t function = std::min(statement.find(".entry"), statement.find(".func"));
    if (all[i] == ';') {
      if (function == statement.npos) variables_.push_back(Trim(statement));  // else a declaration
      begin = i + 1;
    } else if (all[i] == '{') {
      const size_t open = i++;
      for (int depth = 1; depth > 0; ++i) depth += (all[i] == '{') - (all[i] == '}');
      --i;                                       // at the bracket that closes
      if (function == statement.npos) continue;  // an initialiser
      Function f;
      std::string_view head = statement.substr(statement.find_first_of(kSpace, function));
      f.results = TakeList(&head);
      const size_t end = std::min(head.find('('), head.find_first_of(kSpace));
      const std::string name(head.substr(0, end));
      head.remove_prefix(std::min(end, head.size()));
      f.parameters = TakeList(&head);
      f.attributes = head;
      f.body = all.substr(open + 1, i - open - 1);
      functions_[name] = f;
      begin = i + 1;
    }
  }
}

}  // namespace emulator
